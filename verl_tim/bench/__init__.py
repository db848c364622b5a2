"""Benchmarks: what is measured, without printing. `verl_tim.commands.bench` prints; `measure` has the stopwatch."""
