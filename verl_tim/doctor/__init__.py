"""`verl-tim doctor`: what a config and a machine do to zero mismatch, to the correction, and to the run.

`rule.py` what a rule is; `rules/` the rules, one subject per file; `view.py` the config and the machine as rules see
them; `source.py` from command-line words or a file to a config; `examine.py` all rules at once; `page.py` makes
docs/doctor.md.
The start-up checks of `verl_tim.launch` and `verl_tim.training.start_checks` are rules here too, and stay where they
are: they alone stop a run.
"""
