"""Dumps of other engines: read back as written in every format, and refused by name where they cannot be used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_tim.diagnosis.errors import DiagnosisError
from verl_tim.diagnosis.own_file import MARK, refuse_foreign
from verl_tim.training.in_process import ScoredSequence
from verl_tim.verification.engine_dump import DumpedSequence, DumpError, read_dump, write_dump


def sequences(*, hidden=True, top=True):
    made = []
    for prompt, response, temperature in ((2, 3, 1.0), (1, 4, 0.6)):
        generator = torch.Generator().manual_seed(prompt)
        tokens = ScoredSequence(np.arange(prompt) + 5, np.arange(response) + 9)
        made.append(
            DumpedSequence(
                tokens,
                -torch.rand(response, generator=generator),
                temperature,
                top_ids_RK=np.arange(2 * response).reshape(-1, 2) if top else None,
                top_log_probs_RK=-np.ones((response, 2), np.float32) if top else None,
                hidden={
                    "model.norm": torch.rand(prompt + response, 4, generator=generator).bfloat16(),
                    "lm_head": torch.rand(response, 20, generator=generator),
                }
                if hidden
                else {},
            )
        )
    return made


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "parquet"])
def test_round_trip(tmp_path, suffix):
    written = sequences(hidden=suffix != "parquet")
    read = read_dump(write_dump(tmp_path / f"dump.{suffix}", written), vocab_size=20)
    assert len(read) == len(written)
    for a, b in zip(written, read, strict=True):
        assert a.tokens.prompt_P.tolist() == b.tokens.prompt_P.tolist()
        assert a.tokens.response_R.tolist() == b.tokens.response_R.tolist()
        assert torch.equal(a.log_prob_R, b.log_prob_R)
        assert a.temperature == b.temperature
        assert a.top_ids_RK.tolist() == b.top_ids_RK.tolist()
        assert a.hidden.keys() == b.hidden.keys()
        for name in a.hidden:
            assert torch.equal(a.hidden[name].float(), b.hidden[name].float())
            assert b.hidden[name].dtype == (torch.float32 if suffix == "npz" else a.hidden[name].dtype)


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "parquet"])
def test_a_dump_bears_the_mark_by_which_it_may_be_replaced(tmp_path, suffix):
    dump = write_dump(tmp_path / f"dump.{suffix}", sequences(hidden=suffix != "parquet") * 500)
    refuse_foreign(dump)
    arrays = tmp_path / f"other.{suffix}"
    arrays.write_bytes(dump.read_bytes().replace(MARK.encode(), b"x" * len(MARK)))
    with pytest.raises(DiagnosisError, match=f"other.{suffix} is there already"):
        refuse_foreign(arrays)


def plain(**changes):
    arrays = {
        "prompt_ids": np.array([1, 2, 3]),
        "prompt_lengths": np.array([2, 1]),
        "response_ids": np.array([4, 5, 6]),
        "response_lengths": np.array([1, 2]),
        "log_probs": np.array([-1.0, -0.5, -2.0], np.float32),
        **changes,
    }
    return {name: x for name, x in arrays.items() if x is not None}


def test_only_what_is_needed_is_needed(tmp_path):
    np.savez(tmp_path / "a.npz", **plain())
    first, second = read_dump(tmp_path / "a.npz")
    assert (first.temperature, first.hidden, first.top_ids_RK) == (1.0, {}, None)
    assert second.log_prob_R.tolist() == [-0.5, -2.0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"log_probs": None}, "lacks log_probs"),
        ({"response_lengths": np.array([1, 1])}, "response_ids has 3 rows, the lengths add up to 2"),
        ({"response_lengths": np.array([3])}, "2 prompt_lengths but 1 response_lengths"),
        ({"log_probs": np.array([-1.0, np.nan, -2.0], np.float32)}, "sequence 1, response token 0: log_probs is nan"),
        ({"log_probs": np.array([-1.0, -1.0, 0.5], np.float32)}, "response token 1: log_probs is 0.5"),
        ({"response_ids": np.array([4, 5, 60])}, "holds token 60, the model's vocabulary has 20: .* another model"),
        ({"response_lengths": np.array([3, 0])}, "sequence 1 has no response_ids"),
        ({"hidden/model.norm": np.zeros((3, 2))}, "hidden/model.norm has 3 rows, the lengths add up to 6"),
        ({"top_ids": np.zeros((3, 2), int)}, "top_ids and top_log_probs belong together"),
        (
            dict.fromkeys(
                ("prompt_ids", "response_ids", "log_probs", "prompt_lengths", "response_lengths"), np.zeros(0)
            ),
            "holds no sequence",
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, changes, named):
    np.savez(tmp_path / "a.npz", **plain(**changes))
    with pytest.raises(DumpError, match=named):
        read_dump(tmp_path / "a.npz", vocab_size=20)


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(DumpError, match="there is no file"):
        read_dump(tmp_path / "none.npz")
    for suffix in ("npz", "safetensors", "parquet", "txt"):
        (tmp_path / f"x.{suffix}").write_text("text")
        with pytest.raises(DumpError, match=rf"x\.{suffix}"):
            read_dump(tmp_path / f"x.{suffix}")
    with pytest.raises(DumpError, match="no hidden states"):
        write_dump(tmp_path / "a.parquet", sequences())
