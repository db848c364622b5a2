"""`tim.on_policy`: the promise of a REINFORCE run, and what would break it.

With one optimiser step per batch the policy that is updated is the one that was scored, so the trainer's own ratio
exp(log p_now - log p_scored) is 1 on every token, and whatever an update suffers from is the rollout's mismatch. With
`trainer=contract` it is 1 to the last bit, whatever the micro-batches of the two passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_tim.correction import ConfigError
from verl_tim.training.correction_config import CORRECTION_KEY, LOSS_MODE_KEY, of_run
from verl_tim.training.finding import Finding

if TYPE_CHECKING:
    from verl_tim.training.start_checks import Cluster, View

_ACTOR = "actor_rollout_ref.actor"
_KEY = "tim.on_policy"
# The clip's settings and verl's defaults, which nobody gave.
_CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def on_policy(view: View, _: Cluster | None) -> Iterator[Finding]:
    """What breaks the promise of `tim.on_policy`: a second optimiser step per batch, a clip, a KL loss."""
    if view.get(_KEY, False) is not True:
        return
    batch, mini = view.get("data.train_batch_size"), view.get(f"{_ACTOR}.ppo_mini_batch_size")
    if mini != batch:
        yield Finding(
            f"{_ACTOR}.ppo_mini_batch_size",
            f"it is {mini}, data.train_batch_size is {batch}, and {_KEY} promises one optimiser step per batch",
            f"Set it to {batch} (or to ${{data.train_batch_size}} in a YAML), or {_KEY}=false",
        )
    epochs = view.get(f"{_ACTOR}.ppo_epochs", 1)
    if epochs != 1:
        yield Finding(
            f"{_ACTOR}.ppo_epochs",
            f"it is {epochs}, and {_KEY} promises one optimiser step per batch",
            f"Set it to 1, or {_KEY}=false",
        )
    if view.get(f"{_ACTOR}.use_kl_loss", False):
        yield Finding(
            f"{_ACTOR}.use_kl_loss",
            f"it adds a pull to a reference model, and {_KEY} promises the policy gradient alone",
            f"Set it to false, or {_KEY}=false",
        )
    yield from _loss(view)
    for name, default in _CLIPS.items():
        value = view.get(f"{_ACTOR}.{name}", default)
        if value != default:
            yield Finding(
                f"{_ACTOR}.{name}",
                f"it is {value}, and a loss without a ratio ({_KEY}) has nothing to clip",
                f"Leave it out, or set {_KEY}=false and {LOSS_MODE_KEY}=vanilla",
            )


def _loss(view: View) -> Iterator[Finding]:
    loss_mode = str(view.get(LOSS_MODE_KEY, "vanilla"))
    if loss_mode not in ("gpg", "bypass_mode"):
        yield Finding(
            LOSS_MODE_KEY,
            f"it is {loss_mode}, a loss with a ratio that it bounds, and {_KEY} promises -A log p",
            f"Set it to gpg, or {_KEY}=false",
        )
        return
    try:
        correction = of_run(view.config)
    except ConfigError:
        return  # said by the checks of the correction
    if correction.loss_type != "reinforce":
        yield Finding(
            f"{CORRECTION_KEY}.loss_type",
            f"it is {correction.loss_type}, which clips, and {_KEY} promises -A log p",
            f"Take correction=bypass_reinforce, or {_KEY}=false",
        )
