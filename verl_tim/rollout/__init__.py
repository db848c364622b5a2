"""The engine as verl knows it: replica, server actor, weight transfer, seeded agent loop.

Import the modules; this package itself imports nothing, since verl loads parts of it in many processes.
"""
