"""The trainer's side: contract numerics in verl's FSDP2 engine, the CPU platform, start-up checks, a step's observer.

Import the modules; this package itself imports nothing, since verl loads parts of it in many processes.
"""
