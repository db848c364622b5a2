"""The commands of `verl-tim`, one module each: NAME, HELP, NEEDS_ARGUMENTS and `command`, which typer reads."""
