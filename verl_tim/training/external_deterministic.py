"""Module for `actor_rollout_ref.model.external_lib` in a run with `tim.deterministic=true`.

verl imports it when it builds its model config, in each worker before the model is made: what `external` does, and
deterministic kernels from the first one on.
"""

from verl_tim.numerics import determinism
from verl_tim.training import external  # noqa: F401  registers the engine

determinism.turn_on()
