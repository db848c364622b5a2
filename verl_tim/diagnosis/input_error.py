"""`DiagnosisError` under its name of before, for verl_tim/evidence/runs.py."""

from verl_tim.diagnosis.errors import DiagnosisError as InputError

__all__ = ["InputError"]
