"""Module for `actor_rollout_ref.model.external_lib`: registers verl_tim's FSDP2 engine in each process that needs a
model.

verl imports it when it builds its model config (workers/config/model.py:149), in workers and in processes without a
model alike; so it only asks to be told when verl loads its FSDP engine.
"""

from verl_tim.plugin import register_training

register_training()
