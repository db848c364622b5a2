"""`mismatch_metrics`: against plain loops, on the field's known faults, and on input that has no answer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from mismatch_reference import reference_metrics

from verl_tim.diagnosis import mismatch_metrics
from verl_tim.diagnosis.estimators import RatioSums, trainer_self_delta
from verl_tim.diagnosis.metrics import BatchMismatch
from verl_tim.diagnosis.sink import MetricSink
from verl_tim.diagnosis.stats import mean_ranks, segment_sums, sorted_quantiles
from verl_tim.diagnosis.tokens import finite_fp32

NAN, INF = math.nan, math.inf


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float32)


def metrics(old, rollout, mask=None, **fields):
    """From nested lists; a missing mask is all ones."""
    old, rollout = tensor(old), tensor(rollout)
    mask = torch.ones_like(old) if mask is None else torch.tensor(mask)
    fields = {name: tensor(x) if isinstance(x, list) else x for name, x in fields.items()}
    return mismatch_metrics(old_log_probs=old, rollout_log_probs=rollout, response_mask=mask, **fields)


def from_delta(delta, mask=None, **fields):
    """A batch whose mismatch is `delta`, with the rollout at 0, so that no rounding enters d."""
    return metrics(delta, [[0.0] * len(row) for row in delta], mask, **fields)


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


# Against the plain loops ------------------------------------------------------------

fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
log_prob = st.one_of(st.floats(-12, 0, width=32), st.sampled_from([0.0, -0.0, -1.0, -100.0, NAN, INF, -INF, -1e5]))
advantage = st.one_of(st.floats(-3, 3, width=32), st.sampled_from([0.0, 1.0, -1.0, NAN, INF, 1e-30]))


@st.composite
def batches(draw):
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 14))

    def field(elements):
        """(rows, width) of values that fp32 holds exactly, as nested lists."""
        flat = draw(st.lists(elements, min_size=rows * width, max_size=rows * width))
        return torch.tensor(flat, dtype=torch.float32).reshape(rows, width).tolist()

    old = field(log_prob)
    # Equal, near and far from the trainer's: the three regimes of a mismatch.
    kind, other = field(st.integers(0, 2)), field(log_prob)
    rollout = [
        [(x, x * (1 + 1e-3), y)[int(k)] for x, k, y in zip(*three, strict=True)]
        for three in zip(old, kind, other, strict=True)
    ]
    return {
        "old": old,
        "rollout": torch.tensor(rollout, dtype=torch.float32).tolist(),
        "mask": field(st.booleans()),
        "advantages": field(advantage) if draw(st.booleans()) else None,
        "log_prob": field(log_prob) if draw(st.booleans()) else None,
        "kept": field(st.booleans()) if draw(st.booleans()) else None,
        "bypass": draw(st.booleans()),
    }


@settings(max_examples=80, phases=[Phase.generate])
@given(batches())
def test_equals_plain_loops(batch):
    expected = reference_metrics(**batch)
    found = metrics(
        batch["old"],
        batch["rollout"],
        batch["mask"],
        advantages=batch["advantages"],
        log_prob=batch["log_prob"],
        bypass=batch["bypass"],
        kept_mask=None if batch["kept"] is None else torch.tensor(batch["kept"]),
    )
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert isinstance(value, float)
        assert math.isfinite(value), name
        assert math.copysign(1, value) > 0 or value != 0, f"{name} is -0.0"
        # A difference of contributions is as exact as the contributions are large.
        scale = max([1.0, *(abs(v) for k, v in expected.items() if "contribution" in k)]) if "skew" in name else 1.0
        assert value == pytest.approx(expected[name], rel=1e-6, abs=1e-9 * scale), name


@settings(max_examples=25)
@given(st.lists(st.sampled_from([-3e38, 3e38, 0.0, -1e-45, -1.0, NAN, INF]), min_size=24, max_size=24), st.booleans())
def test_no_input_gives_nan(values, bypass):
    old, rollout, log_p, adv = torch.tensor(values).reshape(4, 2, 3)
    found = mismatch_metrics(
        old_log_probs=old,
        rollout_log_probs=rollout,
        response_mask=torch.ones(2, 3),
        advantages=adv,
        log_prob=log_p,
        bypass=bypass,
    )
    assert all(math.isfinite(value) for value in found.values())


@settings(max_examples=25)
@given(batches(), st.randoms(use_true_random=False))
def test_row_order_and_masked_values_do_not_matter(batch, random):
    first = reference_metrics(**batch)
    order = list(range(len(batch["old"])))
    random.shuffle(order)
    shuffled = {k: [v[i] for i in order] if isinstance(v, list) else v for k, v in batch.items()}
    for b, row in enumerate(shuffled["mask"]):
        for t, inside in enumerate(row):
            if not inside:
                shuffled["old"][b] = [*shuffled["old"][b][:t], NAN, *shuffled["old"][b][t + 1 :]]
                shuffled["rollout"][b] = [*shuffled["rollout"][b][:t], 1e30, *shuffled["rollout"][b][t + 1 :]]
    found = metrics(
        shuffled["old"],
        shuffled["rollout"],
        shuffled["mask"],
        advantages=shuffled["advantages"],
        log_prob=shuffled["log_prob"],
        bypass=shuffled["bypass"],
        kept_mask=None if shuffled["kept"] is None else torch.tensor(shuffled["kept"]),
    )
    skewless = {name for name in first if name != "tim/contribution_skew"}
    assert found.keys() == first.keys()
    assert {name: found[name] for name in skewless} == {
        name: pytest.approx(first[name], rel=1e-6, abs=1e-9) for name in skewless
    }


@settings(max_examples=50)
@given(st.lists(fp32, min_size=1, max_size=40), st.floats(0, 1))
@example([1.0], 0.5)
def test_quantiles_are_numpys(values, q):
    numpy = pytest.importorskip("numpy")
    ordered = torch.tensor(values, dtype=torch.float64).sort().values
    # between two values of other sizes: both interpolate, and round by the larger one
    rounding = 1e-15 * max(abs(value) for value in values)
    assert float(sorted_quantiles(ordered, (q,))[0]) == pytest.approx(
        float(numpy.quantile(numpy.array(values, dtype=numpy.float64), q)), rel=1e-9, abs=rounding
    )


def test_tied_ranks_are_shared():
    assert mean_ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 3.0]), st.integers(1, 4)), max_size=12))
@example([])
@example([(0.0, 1), (0.5, 1), (3.0, 1)])
def test_ranks_by_counting(runs):
    values = [value for value, times in runs for _ in range(times)]
    wanted = [sum(x < value for x in values) + (values.count(value) + 1) / 2 for value in values]
    assert mean_ranks(torch.tensor(values, dtype=torch.float64)).tolist() == wanted


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), max_size=8))
@example([0, 3, 0, 0, 2, 0])
def test_sums_of_stretches(counts):
    values = torch.arange(1.0, sum(counts) + 1, dtype=torch.float64)
    wanted = [float(part.sum()) for part in values.split(counts)]
    assert segment_sums(values, torch.tensor(counts, dtype=torch.int64)).tolist() == wanted


def test_finite_is_what_fp32_holds():
    largest = torch.finfo(torch.float32).max
    values = torch.tensor(
        [0.0, largest, 2.0**128 - 2.0**103, math.nextafter(2.0**128 - 2.0**103, 0), 2.0**128, INF, NAN],
        dtype=torch.float64,
    )
    for x in (torch.cat([values, -values]), torch.tensor([largest, INF, -INF, NAN, -0.0])):
        assert torch.equal(finite_fp32(x), torch.isfinite(x.to(torch.float32)))


def test_means_of_a_selection_read_nothing_else():
    sink = MetricSink(torch.device("cpu"))
    some = torch.tensor([True, False, True])
    sink.put_mean("values", torch.tensor([1.0, NAN, 2.0]), some)
    sink.put_mean("counts", torch.tensor([1, 7, 4]), some)
    sink.put_mean("hits", torch.tensor([True, True, False]), some)
    sink.put_mean("none", torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, dtype=torch.bool))
    sink.put_mean("third", torch.tensor([True, False, False]))
    assert sink.finish() == {"tim/values": 1.5, "tim/counts": 2.5, "tim/hits": 0.5, "tim/third": 1 / 3}


def test_shares_of_large_sizes_are_float64():
    found = from_delta([[0.005, 0.5, 21.0]])
    assert [found[f"tim/delta_gt_{x}"] for x in ("0.01", "0.1", "0.5", "1")] == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    assert found["tim/clamped_tokens"] == 1


def test_places_of_rows_with_missing_tokens():
    """A token that is missing keeps its place: those behind it are not counted as earlier."""
    whole = [0.125 * (i + 1) for i in range(12)]
    holed = [NAN if i in (0, 5) else size for i, size in enumerate(whole)]
    found = from_delta([holed, whole[:4] + [0.0] * 8], [[1] * 12, [1] * 4 + [0] * 8])
    tenths = [[size for i, size in enumerate(holed) if i * 10 // 12 == k and size == size] for k in range(10)]
    for k, sizes in enumerate(tenths):
        name = f"tim/delta_abs_mean_by_position_{k}"
        assert (found[name] == close(sum(sizes) / len(sizes))) if sizes else (name not in found)


def test_the_ratio_of_the_loss_can_be_left_out():
    old, rollout = tensor([[-1.0, -2.0, -1.0]]), tensor([[-1.1, -2.0, -1.0]])
    batch = BatchMismatch.of(
        old_log_probs=old,
        rollout_log_probs=rollout,
        response_mask=torch.ones(1, 3),
        advantages=tensor([[1.0, -1.0, 1.0]]),
    )
    log_prob = tensor([[-1.5, -2.5, -0.5]])
    whole, less = batch.with_loss(log_prob=log_prob), batch.with_loss(log_prob=log_prob, loss_ratio=False)
    assert whole.keys() - less.keys() == {
        "tim/ppo_k1", "tim/ppo_k2", "tim/ppo_k3", "tim/clipped_share_pos_adv", "tim/clipped_share_neg_adv"
    }  # fmt: skip
    assert less == {name: whole[name] for name in less}


@pytest.mark.parametrize("bypass", [False, True])
def test_blocks_merge_to_the_whole(monkeypatch, bypass):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    old = -normal(6, 11).abs()
    fields = {
        "old_log_probs": old,
        "rollout_log_probs": old + 0.3 * normal(6, 11),
        "log_prob": old + 0.3 * normal(6, 11),
        "advantages": normal(6, 1).expand(6, 11).clone(),
        "response_mask": normal(6, 11) > -1,
        "bypass": bypass,
    }
    fields["advantages"][0, :3] = torch.tensor([NAN, 0.0, INF])
    fields["log_prob"][1, 2] = NAN
    whole = mismatch_metrics(**fields)
    assert min(whole["tim/clip_both"], whole["tim/clip_mismatch_only"], whole["tim/clip_masked_by_mismatch"]) > 0
    monkeypatch.setattr("verl_tim.diagnosis.metrics.BLOCK", 4)
    assert mismatch_metrics(**fields) == pytest.approx(whole, rel=1e-13)


def test_the_loss_comes_later_and_more_than_once():
    old, rollout = tensor([[-1.0, -2.0, -1.0]]), tensor([[-1.1, -2.0, -1.25]])
    given_first = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": torch.ones(1, 3)}
    given_first["advantages"] = tensor([[1.0, -1.0, INF]])
    batch = BatchMismatch.of(**given_first)
    for later in ({}, {"log_prob": old - 0.25, "kept_mask": tensor([[1.0, 0.0, 1.0]]), "bypass": True}):
        assert batch.with_loss(**later) == mismatch_metrics(**given_first, **later)
    with pytest.raises(ValueError, match="log_prob has shape"):
        batch.with_loss(log_prob=old[:, :2])


# Input kinds ------------------------------------------------------------


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16])
def test_mask_dtypes_agree(mask_dtype):
    old, rollout = tensor([[-1.0, -2.0, -3.0]]), tensor([[-1.5, -2.0, -9.0]])
    found = mismatch_metrics(
        old_log_probs=old, rollout_log_probs=rollout, response_mask=torch.tensor([[1, 1, 0]]).to(mask_dtype)
    )
    assert found["tim/delta_abs_max"] == 0.5
    assert found["tim/exact_fraction"] == 0.5


def test_low_precision_is_up_cast_before_the_subtraction():
    fine, coarse = torch.tensor([[-8.01]]), torch.tensor([[-8.0625]], dtype=torch.bfloat16)
    found = mismatch_metrics(old_log_probs=fine, rollout_log_probs=coarse, response_mask=torch.ones(1, 1))
    assert found["tim/delta_mean"] == close(8.0625 - 8.010000228881836)
    assert found["tim/exact_fraction"] == 0.0


def test_inputs_stay_as_they_are_and_carry_no_graph():
    old = torch.full((2, 3), -1.0, requires_grad=True)
    rollout = torch.full((2, 3), -1.5)
    before = rollout.clone()
    mismatch_metrics(old_log_probs=old, rollout_log_probs=rollout, response_mask=torch.ones(2, 3), log_prob=old * 2)
    assert torch.equal(rollout, before)
    assert old.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_log_probs": torch.zeros(2, 4)}, "rollout_log_probs has shape"),
        ({"response_mask": torch.ones(3, 2)}, "response_mask has shape"),
        ({"response_mask": torch.full((2, 3), 0.5)}, "response_mask must hold only 0 and 1"),
        ({"response_mask": torch.full((2, 3), NAN)}, "response_mask must hold only 0 and 1"),
        ({"old_log_probs": torch.zeros(3)}, "old_log_probs must be a dense"),
        ({"old_log_probs": torch.zeros(2, 3, dtype=torch.int64)}, "old_log_probs must be a floating-point"),
        ({"advantages": torch.zeros(2)}, "advantages has shape"),
        ({"log_prob": torch.zeros(2, 1)}, "log_prob has shape"),
        ({"kept_mask": torch.ones(1, 3)}, "kept_mask has shape"),
        ({"rollout_top1": torch.zeros(2, 3, dtype=torch.int64)}, "train_top1 is missing"),
        ({"rollout_routes": torch.zeros(2, 3, 1, 2, dtype=torch.int64)}, "train_routes is missing"),
        ({"train_routes": torch.zeros(2, 3, 1, 2, dtype=torch.int64)}, "rollout_routes is missing"),
        ({"weight_versions": torch.zeros(2, 3, dtype=torch.int64)}, "belong together"),
        ({"clip_ratio_low": -0.1}, "clip_ratio_low"),
        ({"clip_ratio_high": NAN}, "clip_ratio_high"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    fields = {
        "old_log_probs": torch.zeros(2, 3),
        "rollout_log_probs": torch.zeros(2, 3),
        "response_mask": torch.ones(2, 3),
    }
    with pytest.raises(ValueError, match=message):
        mismatch_metrics(**(fields | change))


def test_nested_tensors_are_refused_with_the_remedy():
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"dense|pad it"):
        mismatch_metrics(old_log_probs=nested, rollout_log_probs=nested, response_mask=torch.ones(2, 3))


# Nothing to measure ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0), (2, 4)])
def test_empty_or_fully_masked_input_has_counts_only(shape):
    fields = {
        name: torch.full(shape, -1.0) for name in ("old_log_probs", "rollout_log_probs", "advantages", "log_prob")
    }
    found = mismatch_metrics(response_mask=torch.zeros(shape), **fields)
    assert found == {"tim/valid_tokens": 0.0, "tim/missing_tokens": 0.0}


def test_only_missing_tokens():
    assert metrics([[-1.0, NAN]], [[NAN, -1.0]]) == {"tim/valid_tokens": 0.0, "tim/missing_tokens": 2.0}


def test_one_token_and_constant_vectors_leave_correlations_out():
    one = from_delta([[0.5]], advantages=[[1.0]])
    constant = from_delta([[0.1, 0.1, 0.1]], advantages=[[1.0, -1.0, 2.0]])
    for found in (one, constant):
        assert not {"tim/delta_adv_pearson", "tim/delta_adv_spearman"} & found.keys()
        assert all(math.isfinite(value) for value in found.values())
    assert constant["tim/delta_std"] == 0.0
    assert from_delta([[0.1, 0.2]], advantages=[[1.0, 2.0]])["tim/delta_adv_pearson"] == close(1.0)


def test_zero_mismatch_is_exactly_zero():
    old = -torch.rand(4, 20, generator=torch.Generator().manual_seed(0)) * 9
    found = mismatch_metrics(
        old_log_probs=old,
        rollout_log_probs=old.clone(),
        response_mask=torch.ones(4, 20),
        advantages=torch.randn(4, 20, generator=torch.Generator().manual_seed(1)),
    )
    assert found["tim/exact_fraction"] == 1.0
    zero = [
        name for name in found if any(part in name for part in ("delta_", "k1", "k2", "k3", "chi2", "contribution"))
    ]
    assert len(zero) > 30
    assert {name: found[name] for name in zero} == dict.fromkeys(zero, 0.0)
    assert found["tim/ratio_p01"] == found["tim/ratio_p99"] == 1.0
    assert "tim/seq_delta_cancel" not in found  # 0 / 0 in every row


# Definitions, by hand ------------------------------------------------------------


def test_exact_fraction_counts_bits_and_not_closeness():
    value = torch.tensor(-1.0)
    one_ulp = torch.nextafter(value, torch.tensor(0.0))
    old = torch.stack([value, value, value, torch.tensor(0.0)])[None]
    rollout = torch.stack([value, one_ulp, value, torch.tensor(-0.0)])[None]
    found = mismatch_metrics(old_log_probs=old, rollout_log_probs=rollout, response_mask=torch.ones(1, 4))
    assert found["tim/exact_fraction"] == 0.5  # +0.0 and -0.0 are different bits though their difference is 0
    assert found["tim/delta_abs_max"] == close(2**-24)


def test_thresholds_are_strict():
    found = from_delta([[0.5, 1.0, -1.5, 0.25]])
    assert [found[f"tim/delta_gt_{t}"] for t in ("0.01", "0.1", "0.5", "1")] == [1.0, 1.0, 0.5, 0.25]


def test_contributions_skew_and_clips():
    # One token of each sign: r_train 1.1 and 1.0; r_rollout 1.65 and 0.61.
    found = metrics(
        [[-1.0, -1.0]],
        [[-1.5, -0.5]],
        log_prob=[[-1.0 + math.log(1.1), -1.0]],
        advantages=[[2.0, -1.0]],
    )
    r = 1.1 * math.exp(0.5)
    assert found["tim/contribution_pos_train"] == pytest.approx(-0.2, rel=1e-5)
    assert found["tim/contribution_pos_rollout"] == pytest.approx(-(r - 1) * 2, rel=1e-5)
    assert found["tim/contribution_neg_train"] == 0.0
    assert found["tim/contribution_neg_rollout"] == pytest.approx(math.exp(-0.5) - 1, rel=1e-5)
    assert found["tim/contribution_skew"] == pytest.approx(-(r - 1) * 2 + math.exp(-0.5) - 1 + 0.2, rel=1e-5)
    assert found["tim/clip_mismatch_only"] == 1.0
    assert found["tim/clip_masked_by_mismatch"] == found["tim/clip_both"] == 0.0
    assert found["tim/clipped_share_pos_adv"] == found["tim/clipped_share_neg_adv"] == 0.0


def test_a_clip_counts_only_where_it_binds_for_the_sign():
    # Ratios 1.65, 0.61 with the advantage on the side where PPO's clip does not bind.
    found = metrics([[-1.0, -1.0]], [[-1.5, -0.5]], advantages=[[-1.0, 1.0]])
    assert found["tim/clip_mismatch_only"] == 0.0
    # Without log_prob the loss's own ratio was not seen, so nothing is said about it.
    assert not {"tim/ppo_k1", "tim/clipped_share_pos_adv"} & found.keys()
    assert found["tim/contribution_pos_train"] == 0.0


def test_clip_masked_by_mismatch():
    # r_train = 1.5 is clipped; r_rollout = 1.5 * exp(-0.5) = 0.91 is not.
    found = metrics([[-1.0]], [[-0.5]], log_prob=[[-1.0 + math.log(1.5)]], advantages=[[1.0]])
    assert found["tim/clip_masked_by_mismatch"] == 1.0
    assert found["tim/clipped_share_pos_adv"] == 1.0
    assert (
        metrics([[-1.0]], [[-0.5]], log_prob=[[-1.0 + math.log(1.5)]], advantages=[[1.0]], bypass=True)[
            "tim/clipped_share_pos_adv"
        ]
        == 0.0
    )


def test_rejected_share_by_sign():
    found = from_delta(
        [[0.1, 0.2, 0.3, 0.4]],
        advantages=[[1.0, 1.0, -1.0, 0.0]],
        kept_mask=torch.tensor([[True, False, False, False]]),
    )
    assert found["tim/rejected_share_pos_adv"] == 0.5
    assert found["tim/rejected_share_neg_adv"] == 1.0


def test_non_finite_log_prob_and_advantage_are_left_out_and_counted():
    found = metrics(
        [[-1.0, -1.0, -1.0]],
        [[-1.5, -1.5, -1.5]],
        log_prob=[[NAN, -1.0, -1.0]],
        advantages=[[1.0, INF, 1.0]],
    )
    assert found["tim/nonfinite_log_prob_tokens"] == 1.0
    assert found["tim/nonfinite_advantage_tokens"] == 1.0
    assert found["tim/valid_tokens"] == 3.0
    assert found["tim/contribution_pos_rollout"] == close(-math.expm1(0.5))
    assert found["tim/token_share_pos_adv"] == 1.0


def test_position_bins_are_tenths_of_the_rows_own_length():
    delta = [[float(i) for i in range(20)], [100.0] * 9 + [0.0] * 11]
    mask = [[1] * 20, [1] * 9 + [0] * 11]
    found = from_delta(delta, mask)
    # The second row has fewer than ten tokens: in no bin.
    assert [found[f"tim/delta_abs_mean_by_position_{i}"] for i in range(10)] == [2 * i + 0.5 for i in range(10)]


def test_length_bins_are_tenths_of_the_width():
    found = from_delta([[1.0] * 20, [2.0] * 20, [4.0] * 20], [[1] * 20, [1] * 5 + [0] * 15, [1] * 1 + [0] * 19])
    bins = {name: value for name, value in found.items() if "by_length" in name}
    stem = "tim/delta_abs_mean_by_length"
    assert bins == {f"{stem}_9": 1.0, f"{stem}_2": 2.0, f"{stem}_0": 4.0}


def test_turns_are_bounded():
    width = 2 * 40
    found = from_delta([[1.0] * width], [[1, 0] * 40])
    turns = [name for name in found if "by_turn" in name]
    assert len(turns) == 33
    assert found["tim/delta_abs_mean_by_turn_33_up"] == 1.0


def test_top1():
    ids = torch.tensor([[1, 2, 3, -1]])
    other = torch.tensor([[1, 5, -1, 4]])
    found = from_delta([[0.1] * 4], rollout_top1=ids, train_top1=other)
    assert found["tim/top1_tokens"] == 2.0
    assert found["tim/top1_flip_rate"] == 0.5
    none = from_delta([[0.1] * 4], rollout_top1=torch.full((1, 4), -1), train_top1=other)
    assert none["tim/top1_tokens"] == 0.0
    assert "tim/top1_flip_rate" not in none
    assert "tim/top1_tokens" not in from_delta([[0.1] * 4], train_top1=other)
    with pytest.raises(ValueError, match="rollout_top1"):
        from_delta([[0.1] * 4], rollout_top1=torch.tensor([[0, 0, 0, -2]]), train_top1=other)


def test_staleness():
    versions = torch.tensor([[3, 3, 4], [4, 4, 4], [0, 0, 0]])
    found = from_delta(
        [[1.0, 1.0, 2.0], [3.0, 3.0, 3.0], [9.0, 9.0, 9.0]],
        [[1, 1, 1], [1, 1, 1], [0, 0, 0]],
        weight_versions=versions,
        current_version=4,
    )
    assert found["tim/staleness_mean"] == close(2 / 6)
    assert found["tim/staleness_max"] == 1.0
    assert found["tim/mixed_version_rows"] == 1.0
    assert found["tim/delta_abs_mean_by_version_lag_0"] == close(11 / 4)
    assert found["tim/delta_abs_mean_by_version_lag_1"] == 1.0
    assert found["tim/delta_abs_max_at_lag_0"] == 3.0
    fresh = from_delta([[1.0, 2.0]], weight_versions=torch.tensor([[4, 4]]), current_version=4)
    assert "tim/delta_abs_max_at_lag_0" not in fresh, "it would be delta_abs_max once more"
    for lags in ([[3, 3]], [[2, 3]]):
        stale = from_delta([[1.0, 2.0]], weight_versions=torch.tensor(lags), current_version=4)
        assert "tim/delta_abs_max_at_lag_0" not in stale
    with pytest.raises(ValueError, match="newer than current_version"):
        from_delta([[1.0]], weight_versions=torch.tensor([[5]]), current_version=4)


# Known faults of the field, with their values ------------------------------------------------------------


def test_b10_all_masked_debug_metrics():
    assert from_delta([[1.0, 2.0]], [[False, False]]) == {"tim/valid_tokens": 0.0, "tim/missing_tokens": 0.0}


def test_b14_the_two_ratios_have_two_names():
    """pi_old = -1.2, pi_theta = -1.0, pi_rollout = -1.1: r_corr = e^-.1, r_ppo under bypass = e^.1."""
    bypass = metrics([[-1.2]], [[-1.1]], log_prob=[[-1.0]], bypass=True)
    recompute = metrics([[-1.2]], [[-1.1]], log_prob=[[-1.0]])
    for found in (bypass, recompute):
        assert found["tim/ratio_p50"] == pytest.approx(0.90484, abs=1e-5)
        assert found["tim/k1"] == pytest.approx(0.1, abs=1e-6)
    assert math.exp(-bypass["tim/ppo_k1"]) == pytest.approx(1.10517, abs=1e-5)
    assert math.exp(-recompute["tim/ppo_k1"]) == pytest.approx(math.exp(0.2), abs=1e-5)


def test_b24_by_turn():
    """|d| = [.1, .1, 9, .5, .5], mask [1, 1, 0, 1, 1]: turn 1 .1, turn 2 .5, overall .3, the masked 9 nowhere."""
    found = from_delta([[0.1, -0.1, 9.0, 0.5, -0.5]], [[1, 1, 0, 1, 1]])
    assert found["tim/delta_abs_mean_by_turn_1"] == pytest.approx(0.1)
    assert found["tim/delta_abs_mean_by_turn_2"] == pytest.approx(0.5)
    assert found["tim/delta_abs_mean"] == pytest.approx(0.3)
    assert max(value for name, value in found.items() if "delta_abs" in name) == pytest.approx(0.5)


def test_b28_missing_log_probs_never_enter_a_statistic():
    """A token never scored by the engine (NaN) beside a recorded 0.0, which is a value."""
    found = metrics([[-1.0, -10.8, -10.8]], [[-1.0, NAN, 0.0]])
    assert found["tim/missing_tokens"] == 1.0
    assert found["tim/valid_tokens"] == 2.0
    assert found["tim/delta_abs_max"] == pytest.approx(10.8)
    assert metrics([[-1.0, -10.8]], [[-1.0, NAN]])["tim/delta_abs_max"] == 0.0


def test_b32_extreme_differences_stay_finite_and_visible():
    """Trainer -.1, rollout -100: d = 99.9. K3's exponential is clamped at 20, its linear term is not."""
    found = metrics([[-0.1]], [[-100.0]])
    assert found["tim/delta_abs_max"] == pytest.approx(99.9, rel=1e-6)
    assert found["tim/k3"] == pytest.approx(math.exp(20) - 1 - 99.9, rel=1e-12)
    assert found["tim/k3"] == pytest.approx(485165174.4, rel=1e-6)
    assert found["tim/clamped_tokens"] == found["tim/clamped_sequences"] == 1.0
    assert all(math.isfinite(value) for value in found.values())


def test_b33_token_mean_and_sample_mean():
    """Rows of 1 token (|d| = 1) and 9 tokens (0): token mean .1, sample mean .5."""
    found = from_delta([[-1.0] + [0.0] * 8, [0.0] * 9], [[1] + [0] * 8, [1] * 9])
    assert found["tim/k1"] == close(0.1)
    assert found["tim/k1_seq_mean"] == close(0.5)
    assert found["tim/k1_seq"] == close(0.5)


def test_b36_padding_and_cancellation():
    """3 valid and 5 pad tokens: means over the valid. d = [.5, -.5]: mean 0, mean |d| .5."""
    padded = from_delta([[1.0] * 3 + [77.0] * 5], [[1] * 3 + [0] * 5])
    assert padded["tim/delta_abs_mean"] == 1.0
    found = from_delta([[0.5, -0.5]])
    assert found["tim/delta_mean"] == 0.0
    assert found["tim/delta_abs_mean"] == 0.5
    assert found["tim/seq_delta_cancel"] == 0.0
    assert found["tim/seq_delta_sum_abs_mean"] == 0.0


def test_b45_nats_and_not_probabilities():
    """Rollout -5, trainer -8: 3 nats, though the probabilities differ by .0064."""
    assert metrics([[-8.0]], [[-5.0]])["tim/delta_abs_max"] == 3.0


# Sums that merge ------------------------------------------------------------


def test_ratio_sums_merge_to_the_whole():
    generator = torch.Generator().manual_seed(3)
    log_p, old = (-torch.rand(6, 9, generator=generator) * 5 for _ in range(2))
    mask = torch.rand(6, 9, generator=generator) > 0.3
    whole = mismatch_metrics(old_log_probs=old, rollout_log_probs=old, response_mask=mask, log_prob=log_p)
    parts = [RatioSums.of(log_p[i : i + 2], old[i : i + 2], mask[i : i + 2]) for i in (0, 2, 4)]
    merged = (parts[0] + parts[1] + parts[2]).metrics()
    assert merged.keys() == {"tim/ppo_k1", "tim/ppo_k2", "tim/ppo_k3"}
    assert merged == {name: close(whole[name]) for name in merged}
    assert RatioSums().metrics() == {}
    assert (parts[0] + RatioSums()).metrics() == parts[0].metrics()


def test_trainer_self_delta():
    old = tensor([[-1.0, -2.0, -3.0]])
    again = tensor([[-1.0, -2.25, 5.0]])
    assert trainer_self_delta(again, old, torch.tensor([[1, 1, 0]])) == {"tim/trainer_self_delta_max": 0.25}
    assert trainer_self_delta(again, old, torch.zeros(1, 3)) == {}
