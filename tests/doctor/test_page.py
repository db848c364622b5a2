"""docs/doctor.md is what the rules say, and every known fault that a config can cause has a rule."""

from pathlib import Path

import pytest

from verl_tim.doctor.page import page
from verl_tim.doctor.rules import ALL

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"

# A public report or a defect of verl 0.9.1, and the rules that name the settings that bring it about.
FAULTS = {
    "verl#6362: outcome reward on a rejected token": ["correction.reward-rejected"],
    "verl#3984: rejection leaves nothing to whiten": ["stops.whitening-empty"],
    "verl#7196, probability-space metrics, absent in bypass": ["note.mismatch-metric"],
    "verl#6158, #3996, #6963, #6616: no rollout log-probs": [
        "correction.log-probs-missing",
        "start.correction-reaches-the-loss",
    ],
    "verl#4070: two meanings of the old log-probs": ["correction.bypass-loss-without-bypass"],
    "verl#3915: denominators before rejection": ["correction.denominators"],
    "verl#6240, trl#6789: constants of sampling": ["exact.logprobs-mode", "exact.sampling-support"],
    "verl#6280, #2996: other micro-batch shapes": ["exact.micro-batches"],
    "verl#7340, #5037, #7106: router replay that does not replay": ["start.routing-replay", "exact.routes"],
    "verl#6570, #6572, #5179, #3126: determinism variables": [
        "exact.determinism-variables",
        "exact.variables-left-behind",
    ],
    "vllm#57016, #51187, #28131: holes of batch invariance": ["exact.batch-invariance", "note.batch-invariance-gaps"],
    "multi-output sessions lose their advantage": ["correction.reward-rejected"],
    "geometric mean of a zeroed weight": ["correction.geometric-zero"],
    "rollout logits masked beyond the tokenizer": ["exact.vocabulary-padding", "correction.padding-rejects-all"],
    "trl#4159, prime-rl#697: temperature": ["exact.head-temperature", "start.values"],
    "vllm#27433: prefix cache, cold against warm": ["exact.prefix-cache"],
    "sglang#28063: prefill cut by load": ["exact.batch-invariance"],
    "sglang#25790: fp8 keys and values": ["exact.kv-cache-dtype"],
    "vllm#51290, #30907: compiler fusions, tensor parallelism": ["exact.rollout-parallel", "exact.torch-compile"],
    "slime#830: an autocast around the log-prob": ["exact.autocast", "note.gate-off"],
    "vime#64: raw against processed log-probs": ["exact.logprobs-mode"],
    "RoPE table rounded": ["exact.model-dtype"],
    "verl#3723: sequence parallelism with the fused head": ["exact.fused-sequence-parallel", "exact.sequence-parallel"],
    "re-tokenised conversations": ["exact.retokenisation"],
    "FlashAttention 3 outside its head dims": ["exact.attention-head-dim"],
    "asynchronous weight versions": ["exact.staleness"],
    "verl 0.9.1: bypass never reaches the worker": ["correction.bypass-in-the-driver-only"],
    "verl 0.9.1: a worker that is told nothing weighs sequences": ["correction.worker-default"],
    "verl 0.9.1: inverted K1 band": ["correction.k1-band-inverted"],
    "verl 0.9.1: one seed for a group": ["stops.clones"],
    "verl 0.9.1: silent hang on few cores": ["start.ray"],
    "verl 0.9.1: tensor parallelism of 2 by default": ["exact.rollout-parallel", "start.rollout"],
    "verl 0.9.1: flash_attention_2 by default": ["stops.flash-attention-missing", "start.cpu"],
    "verl 0.9.1: bf16 autocast beside an fp32 rollout": ["exact.dtypes", "start.dtypes"],
    "verl 0.9.1: polling every two seconds": ["waste.polling"],
    "verl 0.9.1: a broken plugin is silent": ["correction.plugin-not-loaded"],
    "verl 0.9.1: use_fused_kernels=false bypasses the contract": ["start.contract"],
    "an unquoted 0.5_5": ["correction.band-read-as-number", "correction.threshold-below-one"],
    "rejection by r_corr in later mini-batches": ["correction.drift-rejected", "start.correction-reaches-the-loss"],
    "GSPO and a sequence weight": ["correction.sequence-ratio-twice"],
    "options of the engine dropped, pool too small, TP > 1 accepted": ["start.rollout"],
    "deterministic algorithms fill every tensor": ["waste.deterministic-fill"],
}


def test_the_page_is_what_the_rules_say():
    assert PAGE.read_text() == page(), "python -m verl_tim.doctor.page > docs/doctor.md"


def test_every_rule_is_on_the_page():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert {row.split("`")[1] for row in rows} >= {rule.id for rule in ALL}
    assert all(row.count(" | ") == 5 for row in rows if "." in row.split("`")[1])


@pytest.mark.parametrize("fault", FAULTS)
def test_known_faults_have_rules(fault):
    assert set(FAULTS[fault]) <= {rule.id for rule in ALL}
