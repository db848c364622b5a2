"""The commands of `verl-tim`, one module each: NAME, HELP and `command`, which typer reads."""
