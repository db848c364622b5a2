"""Layer by layer: exact where it must be, the first parted op named where one was planted, on every kind of side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_tim.training.in_process import InProcessTrainer, ScoredSequence
from verl_tim.verification.faults import stock_activation, stock_kernel
from verl_tim.verification.forward import engine_forward, trainer_forward
from verl_tim.verification.layers import LayerReport, LayersError
from verl_tim.verification.subject import Subject

pytestmark = pytest.mark.usefixtures("one_rank")


def sequences(count=3, seed=0):
    rng = np.random.default_rng(seed)
    return [ScoredSequence(*(rng.integers(0, 90, n) for n in (3 + 5 * at, 4 + at))) for at in range(count)]


def report(path, rollout="vexact", trainer="contract", dtype="bfloat16"):
    subject = Subject(path, dtype=dtype, rollout=rollout, trainer_numerics=trainer)
    made = LayerReport(rollout, trainer)
    engine = subject.engine()
    for sequence in sequences():
        sides = (engine_forward(engine, sequence, 0.7), trainer_forward(subject.trainer, sequence, 0.7))
        tokens = len(sequence.prompt_P) + len(sequence.response_R)
        made.add(sides[0].taps, sides[1].taps, tokens=tokens)
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_vexact_and_contract_are_zero_in_every_row(random_models, kind, dtype):
    made = report(random_models[kind], dtype=dtype)
    assert made.first is None
    assert "agree bit for bit" in made.summary()
    assert (made.only_rollout, made.only_trainer) == ([], [])
    assert all(op.max_abs == op.max_rel == op.max_ulp == 0 and op.elements > 0 for op in made.ops)
    kinds = {op.op for op in made.ops}
    expected = {"embedding", "norm", "qkv", "attention", "o_proj", "MLP", "logits", "log-prob"}
    assert kinds == expected | ({"router"} if kind == "qwen3_moe" else set())


@pytest.mark.parametrize(("fault", "op"), [(stock_kernel, "self_attn.attention"), (stock_activation, "mlp")])
def test_the_first_parted_op_is_named(random_models, fault, op):
    with fault():
        made = report(random_models["qwen3"])
    assert made.first.name == f"model.layers.0.{op}"
    before = made.ops[: made.ops.index(made.first)]
    assert before
    assert all(op.differing == 0 for op in before)
    assert made.ops[-1].differing > 0


@pytest.mark.parametrize(
    ("kind", "sides"),
    [
        ("qwen3", ("vexact", "stock")),
        ("qwen3", ("stock", "contract")),
        ("qwen3_moe", ("vexact", "stock")),
        ("qwen3_moe", ("stock", "stock")),
    ],
)
def test_stock_sides_show_the_same_ops(random_models, kind, sides):
    made = report(random_models[kind], *sides)
    assert (made.only_rollout, made.only_trainer) == ([], [])
    assert made.ops[0].name == "model.embed_tokens"
    assert made.ops[0].differing == 0
    sizes = {op.name: op for op in made.ops}
    assert sizes["log_prob"].max_abs > 0
    # the same mathematics: no op is far off, relative to its size in bfloat16
    assert sizes["model.layers.0.self_attn.attention"].mean_abs < 0.01
    assert sizes["model.layers.1.mlp"].mean_abs < 0.05
    assert sizes["lm_head"].max_abs < 1.0


def test_hooks_on_a_plain_model_are_those_of_verls_trainer(random_models):
    """In float32, transformers alone and under verl's FSDP2 engine compute the same bits."""
    from transformers import AutoModelForCausalLM

    from verl_tim.verification.hf_taps import record_hf

    trainer = InProcessTrainer(random_models["qwen3_moe"], dtype="float32", numerics="stock")
    plain = AutoModelForCausalLM.from_pretrained(random_models["qwen3_moe"], attn_implementation="sdpa")
    (sequence,) = sequences(1)
    tokens = torch.from_numpy(np.concatenate([sequence.prompt_P, sequence.response_R]))[None]
    with torch.no_grad(), record_hf(plain) as taps:
        plain(tokens)
    verl = trainer_forward(trainer, sequence).taps
    assert taps.keys() == verl.keys() - {"log_prob"}
    for name in taps.keys() - {"lm_head"}:
        torch.testing.assert_close(taps[name], verl[name], rtol=1e-4, atol=1e-5, msg=name)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())


def test_route_flips_are_counted_not_measured(random_models):
    made = report(random_models["qwen3_moe"], "stock", "contract")
    routes = [op for op in made.ops if op.name.endswith(".routes")]
    assert routes
    assert all(LayerReport.cells(op)[4] == "–" for op in routes)


def one(name="model.norm", value=1.0, shape=(4, 3), dtype=torch.float32):
    return {name: torch.full(shape, value, dtype=dtype)}


def test_sizes_of_a_known_difference():
    made = LayerReport("a", "b")
    other, base = one(), one()
    for side in (other, base):
        side["model.norm"][0, 0] = 1 + 2**-20  # which bfloat16 has not
    other["model.norm"][2, 1] = 1.5
    made.add(other, base, tokens=4)
    (op,) = made.ops
    assert (op.elements, op.differing, op.first) == (12, 1, (0, 2))
    assert (op.max_abs, op.max_rel) == (0.5, 0.5 / 1.5)
    assert op.mean_abs == pytest.approx(0.5 / 12)
    assert (op.max_ulp, op.ulp_format) == (1 << 22, "float32")
    assert "position 2" in made.summary()


def test_bfloat16_is_counted_in_its_own_steps():
    made = LayerReport("a", "b")
    made.add(one(value=1.0, dtype=torch.bfloat16), one(value=1.0078125, dtype=torch.bfloat16), tokens=4)
    assert (made.ops[0].max_ulp, made.ops[0].ulp_format) == (1, "bfloat16")


def test_bfloat16_values_out_of_a_file_that_has_no_bfloat16_are_counted_so_too():
    made = LayerReport("a", "b")
    made.add(one(value=1.0), one(value=1.0078125), tokens=4)
    assert (made.ops[0].max_ulp, made.to_dict()["ops"][0]["ulp_format"]) == (1, "bfloat16")
    made.add(one(value=1.0), one(value=1 + 2**-20), tokens=4)  # another sequence
    (op,) = made.to_dict()["ops"]
    assert (op["max_ulp"], op["ulp_format"]) == (1 << 16, "float32")
    assert op.keys().isdisjoint(("max_steps", "narrow"))


def test_expert_ids_have_no_ulp():
    made = LayerReport("a", "b")
    ids = one("model.layers.0.mlp.routes", 3, dtype=torch.int64)
    other = {name: x.clone() for name, x in ids.items()}
    other["model.layers.0.mlp.routes"][1, 2] = 7
    made.add(other, ids, tokens=4)
    (op,) = made.to_dict()["ops"]
    assert (op["differing"], op["elements"], op["first"]) == (1, 12, (0, 1))
    sizes = ("max_abs", "sum_abs", "mean_abs", "max_rel", "sum_rel", "mean_rel", "max_ulp", "ulp_format")
    assert [op[name] for name in sizes] == [None] * len(sizes)
    assert made.summary().endswith("position 1: 1 of 12 expert ids")


def test_bad_sides_are_refused():
    with pytest.raises(LayersError, match="no result in common"):
        LayerReport("a", "b").add(one("x"), one("y"), tokens=4)
    with pytest.raises(LayersError, match="same tokens of the same model"):
        LayerReport("a", "b").add(one(shape=(4, 3)), one(shape=(5, 3)), tokens=4)
    with pytest.raises(LayersError, match=r"not finite in sequence 0, position 0"):
        LayerReport("a", "b").add(one(value=float("nan")), one(), tokens=4)
    with pytest.raises(LayersError, match="nothing is shown"):
        LayerReport("a", "b").summary()


def test_page_and_json(random_models, tmp_path):
    made = report(random_models["qwen3"], "stock", "contract")
    page = made.page().write(tmp_path / "layers.html").read_text()
    assert made.summary().split(" (")[0] in page
    assert 'class="marked"' in page
    assert "Plotly" in page
    assert made.to_dict()["first_differing"] == made.first.name


def test_in_80_columns_every_op_is_one_line_with_its_whole_name(random_models):
    import io

    from rich.console import Console

    made = report(random_models["qwen3_moe"], "stock", "contract")
    for op in made.ops:  # as wide as numbers get
        op.differing, op.max_abs, op.sum_rel = 12_345_678, 1.23e-5, 1.23e-5 * op.elements
        op.max_steps, op.narrow = 2_147_483_647, False
    console = Console(width=80, file=io.StringIO())
    console.print(made.table())
    lines = console.file.getvalue().splitlines()
    assert "…" not in console.file.getvalue()
    rows = [line for line in lines if "12,345,678" in line]
    assert len(rows) == len(made.ops)
    assert len(lines) == len(rows) + 4  # title, headings, a rule, what is on the page
    for line, op in zip(rows, made.ops, strict=True):
        layer, name, *_ = LayerReport.cells(op)[:1] + LayerReport.cells(op)[2:]
        assert line.split()[: 1 + bool(layer)] == [*([layer] if layer else []), name.split()[0]]
        assert op.name.endswith(".routes") or line.split()[-3:] == ["1.2·10⁻⁵", "1.2·10⁻⁵", "2,147,483,647"]
