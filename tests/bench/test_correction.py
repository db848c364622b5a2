"""The benchmark measures two computations of one thing, and its command prints both."""

import json

import pytest
import torch
from typer.testing import CliRunner

from verl_tim.bench import correction, measure
from verl_tim.bench.correction import CORRECTION, LOSS, calls, make_batch, verl_arguments
from verl_tim.cli import app
from verl_tim.correction import PRESETS, RolloutCorrectionConfig

CPU = torch.device("cpu")
SMALL = ["bench", "correction", "--rows", "4", "--tokens", "64", "--repeats", "1"]


def config_of(preset):
    return RolloutCorrectionConfig.from_mapping({"preset": preset})


@pytest.fixture(scope="module")
def batch():
    return make_batch(16, 512, CPU, seed=3)


def test_the_batch_is_like_one_of_training():
    batch = make_batch(64, 2048, CPU)
    mask = batch.response_mask.bool()
    lengths = mask.sum(dim=1)
    assert lengths.min() > 0
    assert lengths.max() > 4 * lengths.min()
    assert torch.equal(mask, torch.arange(2048) < lengths[:, None])
    delta = (batch.old_log_probs - batch.rollout_log_probs)[mask]
    assert 0.005 < delta.abs().mean() < 0.05
    assert delta.abs().max() > 0.1
    assert batch.log_prob.dtype == torch.float32


@pytest.mark.parametrize("preset", ["none", "token_tis", "sequence_tis", "bypass_ppo", "bypass_reinforce"])
def test_both_sides_compute_the_same_loss(batch, preset):
    """Without rejection their definitions agree, so what is timed is one thing."""
    ours, verl = correction._ours(config_of(preset), batch), correction._verl(config_of(preset), batch)
    loss, metrics = ours[LOSS]()
    verls_loss, verls_metrics = verl[LOSS]()
    assert loss.item() == pytest.approx(verls_loss.item(), rel=1e-4)
    assert metrics["rollout_corr/kl"] == pytest.approx(verls_metrics["rollout_corr/kl"], rel=1e-3)


def test_both_sides_compute_the_same_weights(batch):
    weights, mask, metrics = correction._ours(config_of("token_tis"), batch)[CORRECTION]()
    found, verls_mask, verls_metrics = correction._verl(config_of("token_tis"), batch)[CORRECTION]()
    torch.testing.assert_close(weights, found.batch["rollout_is_weights"])
    assert torch.equal(mask, verls_mask.bool())
    name = "rollout_corr/rollout_is_mean"
    assert metrics[name] == pytest.approx(verls_metrics[name], rel=1e-5)


def test_what_verl_cannot_say_is_measured_alone(batch):
    none = {name for name in PRESETS if "sum" not in name and verl_arguments(config_of(name)) is None}
    assert none == {"token_tis_ratio", "seq_reject_ppo_k1", "seq_reject_ppo_k3"}
    assert verl_arguments(config_of("paper_tis_seq_sum")) is None  # a band with an open end
    (row, _) = correction.benchmark(["token_tis_ratio"], batch, repeats=1)
    assert row.verl is None
    assert row.ours.seconds > 0


def test_every_call_is_announced(batch):
    presets = ("token_tis", "token_tis_ratio")
    done = []
    rows = list(correction.benchmark(presets, batch, repeats=2, done=lambda: done.append(1)))
    assert len(done) == calls(presets, repeats=2)
    assert [(row.preset, row.part) for row in rows] == [(p, part) for p in presets for part in (CORRECTION, LOSS)]


def test_peak_memory_is_what_one_call_takes():
    wanted = 96 * 2**20

    def take():
        torch.ones(wanted // 4).add_(1)

    peak = measure.peak_bytes(take, CPU)
    assert peak == pytest.approx(wanted, rel=0.1)
    assert measure.peak_bytes(lambda: None, CPU) < wanted // 20


def test_time_is_the_median_and_calls_take_turns(monkeypatch):
    order = []
    functions = {name: (lambda name=name: order.append(name)) for name in "ab"}
    ticks = iter([0.0, 1.0, 0.0, 5.0, 0.0, 2.0, 0.0, 6.0, 0.0, 9.0, 0.0, 7.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    measured = measure.measure(functions, CPU, repeats=3)
    assert order == ["a", "b", *"ab" * 3]
    assert (measured["a"].seconds, measured["b"].seconds) == (2.0, 6.0)


# ------------------------------------------------------------------------------------------------------ command line


def test_json():
    result = CliRunner().invoke(app, [*SMALL, "--preset", "token_tis", "--preset", "icepop", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["rows"], report["tokens"], report["device"]) == (4, 64, "cpu")
    assert {"torch", "threads", "load", "date", "valid_share"} <= set(report)
    assert [(row["preset"], row["part"]) for row in report["results"]] == [
        (preset, part) for preset in ("token_tis", "icepop") for part in ("correction", "loss")
    ]
    for row in report["results"]:
        for side in ("ours", "verl"):
            assert row[side]["seconds"] > 0
            assert set(row[side]) == {"seconds", "cpu_seconds", "peak_bytes"}


def test_table():
    result = CliRunner().invoke(app, [*SMALL, "--preset", "token_tis_ratio"])
    assert result.exit_code == 0, result.output
    assert "(4, 64) tensors" in result.stdout
    assert "has none" in result.stdout


@pytest.mark.parametrize(
    ("words", "key", "remedy"),
    [
        (["--preset", "token_tsi"], "--preset", "'token_tis'"),
        (["--preset", "seq_reject_corr_sum_k3"], "--preset", "has a threshold"),
        (["--device", "tpu"], "--device", "cpu or cuda"),
    ],
)
def test_bad_input(words, key, remedy):
    result = CliRunner().invoke(app, [*SMALL, *words])
    assert result.exit_code == 2
    assert f"{key}: " in result.stderr
    assert remedy in result.stderr


def test_cuda_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, [*SMALL, "--device", "cuda"])
    assert result.exit_code == 2
    assert "--device cpu" in result.stderr


@pytest.mark.gpu
def test_on_a_gpu():
    result = CliRunner().invoke(app, [*SMALL, "--device", "cuda", "--json"])
    assert result.exit_code == 0, result.output
    assert all(row["ours"]["peak_bytes"] > 0 for row in json.loads(result.stdout)["results"])


def test_the_group_lists_its_benchmarks():
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    assert "correction" in result.output
