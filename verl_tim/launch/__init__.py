"""What happens before verl's first line: compose, make what is missing, check, start and watch.

Read in this order: `recipes` (which recipes there are), `compose` (overrides to a config), `prepare` (absolute paths,
project-made model and data, what a start adds), `environment` (variables of the workers), `checks` (one function per
way to fail), `run_folder` (taken once), `start` (all of that in order), `callback` (the same for a plain
`python -m verl.trainer.main_ppo`), `process` (verl as a child process), `restarts` (again, after a death), `matrix`
(several runs), `changed` (finished ones that would be others now). `cluster` is what launchers must be told of a
cluster.
"""
