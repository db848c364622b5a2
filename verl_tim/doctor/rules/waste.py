"""What costs time or disk and buys nothing, and a watch that is off."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tim.doctor.rule import ACTOR, MODEL, ROLLOUT, Rules, Severity, found
from verl_tim.doctor.view import View
from verl_tim.training.config import ReuseConfig
from verl_tim.training.determinism import SWITCH
from verl_tim.training.finding import Finding
from verl_tim.training.reuse import ENABLED_KEY

RULES = Rules()
rule = RULES.rule


@rule(
    "waste.deterministic-fill",
    Severity.WASTE,
    f"{ACTOR}.fsdp_config.full_determinism",
    remedy=f"{SWITCH}=true in its place, which turns the fill off",
)
def deterministic_fill(view: View) -> Iterator[Finding]:
    """torch.use_deterministic_algorithms fills every new tensor with NaN first, one more kernel per allocation, unless
    torch.utils.deterministic.fill_uninitialized_memory is off.
    """
    key = f"{ACTOR}.fsdp_config.full_determinism"
    if view.get(key, False):
        yield found(key, "it is true")


@rule(
    "waste.no-byte-code",
    Severity.WASTE,
    "PYTHONDONTWRITEBYTECODE",
    remedy="unset it, or once per image or machine: python -m compileall -q -j 0 SITE_PACKAGES",
)
def no_byte_code(view: View) -> Iterator[Finding]:
    """Python compiles every module that it imports, and may not keep what it made; a run has some twenty processes. On
    an H200's host verl's trainer was imported in 20 s of CPU, with byte code in 8 s; compiling all packages took 8 s.
    """
    key, value = view.variable("PYTHONDONTWRITEBYTECODE")
    if value and view.machine is not None and not view.machine.byte_code:
        yield found(key, "it is set, and installed packages came without byte code")


@rule(
    "waste.polling",
    Severity.WASTE,
    "trainer.v1.sampler.custom_sampler",
    "tim.poll_interval",
    remedy="add a tim: group (tim.poll_interval=0.1), or a sampler of your own",
)
def polling(view: View) -> Iterator[Finding]:
    """verl's V1 trainer looks at its replay buffer every 2 seconds: 2.1 s of a step of 2.8 s with a small model."""
    ours = view.get("trainer.v1.sampler.custom_sampler.name") is not None
    if view.native and view.get("trainer.use_v1", True) and not ours:
        yield found("trainer.v1.sampler.custom_sampler", "it is verl's own")


@rule(
    "waste.checkpoints-pile-up",
    Severity.WASTE,
    "trainer.max_actor_ckpt_to_keep",
    remedy="trainer.max_actor_ckpt_to_keep=2",
)
def checkpoints_pile_up(view: View) -> Iterator[Finding]:
    """verl keeps every checkpoint it writes, each 12 bytes per parameter, unless it is told how many."""
    if view.whole("trainer.save_freq", -1) > 0 and view.get("trainer.max_actor_ckpt_to_keep") is None:
        yield found(
            "trainer.max_actor_ckpt_to_keep", f"it is null, and trainer.save_freq is {view.get('trainer.save_freq')}"
        )


@rule(
    "waste.group-of-one",
    Severity.WASTE,
    f"{ROLLOUT}.n",
    "algorithm.adv_estimator",
    remedy=f"raise {ROLLOUT}.n, to 8 for example, or algorithm.adv_estimator=reinforce_plus_plus",
)
def group_of_one(view: View) -> Iterator[Finding]:
    """These estimators compare the answers to one prompt; a single answer has nothing to be compared with."""
    estimator = str(view.get("algorithm.adv_estimator", "gae"))
    groups = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg")
    if estimator in groups and view.whole(f"{ROLLOUT}.n", 1) == 1:
        yield found(f"{ROLLOUT}.n", f"it is 1 with {estimator}")


_MASKED = ("sdpa", "eager")


@rule(
    "waste.packed-sdpa",
    Severity.WASTE,
    f"{MODEL}.override_config.attn_implementation",
    f"{MODEL}.use_remove_padding",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    remedy=f"pip install flash-attn and {MODEL}.override_config.attn_implementation=flash_attention_2; "
    "trainer=contract; or a budget of one longest sequence",
)
def packed_sdpa(view: View) -> Iterator[Finding]:
    """With use_remove_padding a micro-batch is one row of sequences, and for sdpa and eager transformers masks them
    from each other by a matrix (masking_utils.py): attention costs the square of the micro-batch's tokens, where
    flash_attention_2 and the contract pay for each sequence alone. At Qwen3-1.7B's shape with 32,768 tokens no step was
    done within two minutes on an H200 that needs 20 s with the contract.
    """
    packed = view.get(f"{MODEL}.use_remove_padding", False) and view.get(f"{ACTOR}.use_dynamic_bsz", False)
    if view.contract or view.on_cpu or not view.on_fsdp or not packed or view.attention not in _MASKED:
        return
    longest = view.whole("data.max_prompt_length", 0) + view.whole("data.max_response_length", 0)
    budget = view.whole(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)
    if longest and budget >= 2 * longest:
        yield found(
            f"{MODEL}.override_config.attn_implementation",
            f"it is {view.attention}, and a micro-batch holds up to {budget} tokens of sequences of at most {longest}",
        )


@rule(
    "waste.log-probs-twice",
    Severity.WASTE,
    "algorithm.rollout_correction.old_forward",
    remedy="set algorithm.rollout_correction.old_forward=null",
)
def log_probs_twice(view: View) -> Iterator[Finding]:
    """old_forward adds a pass over the whole batch to know d everywhere; with a rollout that agrees bit for bit d is
    0.
    """
    if view.zero_mismatch and view.correction is not None and view.correction.old_forward:
        yield found("algorithm.rollout_correction.old_forward", "it is true")


@rule(
    "note.audited-once",
    Severity.NOTE,
    "tim.reuse_rollout_log_probs.audit_every",
    "trainer.total_training_steps",
    remedy="lower it: each audit costs one forward pass over the batch",
)
def audited_once(view: View) -> Iterator[Finding]:
    """With fewer steps than that only the first one compares a whole batch; the others compare what their first
    mini-batch sees.
    """
    key, steps = "tim.reuse_rollout_log_probs.audit_every", view.whole("trainer.total_training_steps", 0)
    if view.get(ENABLED_KEY, False) and 0 < steps < view.whole(key, ReuseConfig.audit_every):
        yield found(key, f"it is {view.whole(key, ReuseConfig.audit_every)}, and the run has {steps} steps")


@rule(
    "note.gate-off",
    Severity.NOTE,
    "tim.gate.exact",
    "tim.gate.on_mismatch",
    remedy="leave tim.gate at {exact: true, on_mismatch: stop}",
    reports=("slime#833",),
)
def gate_off(view: View) -> Iterator[Finding]:
    """Rollout and trainer should agree bit for bit here, and nothing ends the run when they cease to: parity has been
    lost by an autocast or a version elsewhere, and was found by a user.
    """
    if not view.zero_mismatch:
        return
    if view.get("tim.gate.exact", True) is False:
        yield found("tim.gate.exact", "it is false")
    elif view.get("tim.gate.on_mismatch", "stop") == "warn":
        yield found("tim.gate.on_mismatch", "it is warn")
