"""What is measured and how it is read: mismatch metrics, the bit gate, manifests, run folders and their comparison.

Knows tensors, plain dicts and run folders; imports nothing of verl.
"""

from verl_tim.diagnosis.metrics import mismatch_metrics

__all__ = ["mismatch_metrics"]
