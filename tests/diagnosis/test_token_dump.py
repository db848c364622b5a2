"""Token dumps: what is written is read back, whole sequences within the budget, and errors that say what to do."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from verl_tim.diagnosis.token_dump import (
    SCHEMA,
    DumpedSequence,
    TokenDumpError,
    choose_sequences,
    dumped_steps,
    read_dumps,
    write_step,
)

LOG_PROBS = ("old_log_prob", "rollout_log_prob", "log_prob")


def sequence(row=0, tokens=3, **changes):
    values = {
        "row": row,
        "uid": f"uid{row // 2}",
        "group": row // 2,
        "position_N": np.arange(tokens),
        "token_id_N": np.arange(tokens) + 10,
        "text_N": [f"t{i}" for i in range(tokens)],
        "advantage_N": np.full(tokens, 0.5, np.float32),
        "kept_N": np.ones(tokens, bool),
        "turn_N": np.ones(tokens, np.int64),
    }
    return DumpedSequence(**{**values, **changes})


def test_what_is_written_is_read_back(tmp_path):
    full = sequence(
        2,
        old_log_prob_N=np.array([-1.0, -2.0, -3.0], np.float32),
        rollout_log_prob_N=np.array([-1.0, np.nan, -3.5], np.float32),
        log_prob_N=np.array([-1.25, -2.0, -3.0], np.float32),
        weight_version_N=np.array([5, 6, -1]),
        top1_rollout_N=np.array([10, 5, -1], np.int32),
        top1_train_N=np.array([10, 11, 12], np.int32),
        routes_rollout_NJ=np.array([[0, 3, 1, 2], [1, 0, 3, 2]], np.int16),
        routes_train_NJ=np.array([[0, 3, 1, 2], [1, 0, 3, 2], [0, 1, 2, 3]], np.int16),
    )
    path = write_step(
        tmp_path, 7, [sequence(0, 2), full], layers=(1, 3), top_k=2, correction={"rollout_is": None}, model_path="m"
    )
    assert path.name == "step_000007.parquet"
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half-written is left"
    table = read_dumps(tmp_path)
    assert table.schema.equals(SCHEMA)
    rows = table.to_pylist()
    assert [row["row"] for row in rows] == [0, 0, 2, 2, 2]
    assert [row["length"] for row in rows] == [2, 2, 3, 3, 3]
    assert {name for name, value in rows[0].items() if value is None} == {
        "old_log_prob", "rollout_log_prob", "log_prob", "weight_version", "top1_rollout", "top1_train",
        "routes_rollout", "routes_train",
    }  # fmt: skip
    assert rows[3] == {
        "step": 7, "row": 2, "uid": "uid1", "group": 1, "position": 1, "length": 3, "token_id": 11, "text": "t1",
        "old_log_prob": -2.0, "rollout_log_prob": None, "log_prob": -2.0, "advantage": 0.5, "kept": True,
        "weight_version": 6, "top1_rollout": 5, "top1_train": 11, "turn": 1,
        "routes_rollout": [1, 0, 3, 2], "routes_train": [1, 0, 3, 2],
    }  # fmt: skip
    assert (rows[4]["top1_rollout"], rows[4]["routes_rollout"], rows[4]["routes_train"]) == (None, None, [0, 1, 2, 3])
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert json.loads(metadata["layers"]) == [1, 3]
    assert json.loads(metadata["correction"]) == {"rollout_is": None}
    assert (metadata["format"], metadata["top_k"], metadata["model_path"]) == ("1", "2", "m")


def test_log_probs_have_no_dictionary(tmp_path):
    values = np.array([-1.0, -2.0, -3.0], np.float32)
    routes = np.array([[0, 3], [1, 0], [0, 1]], np.int16)
    path = write_step(tmp_path, 1, [sequence(old_log_prob_N=values, log_prob_N=values, routes_train_NJ=routes)])
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    plain = {c.path_in_schema for c in columns if "RLE_DICTIONARY" not in c.encodings}
    assert plain == {*LOG_PROBS, "kept"}


def test_log_prob_bits_survive(tmp_path):
    values = np.frombuffer(np.random.default_rng(0).bytes(4 * 500), np.float32)
    values = np.where(np.isnan(values), np.float32(-0.0), values)
    write_step(tmp_path, 1, [sequence(tokens=500, old_log_prob_N=values)])
    back = read_dumps(tmp_path)["old_log_prob"].to_numpy()
    assert (back.view(np.int32) == values.view(np.int32)).all()


def test_steps_are_chosen_and_ordered(tmp_path):
    for step in (3, 1, 20):
        write_step(tmp_path, step, [sequence(tokens=step)])
    assert dumped_steps(tmp_path) == [1, 3, 20]
    assert read_dumps(tmp_path)["step"].to_pylist() == [1] * 1 + [3] * 3 + [20] * 20
    assert read_dumps(tmp_path, steps=[20, 1])["step"].to_pylist() == [1] + [20] * 20
    with pytest.raises(TokenDumpError, match="no dump of step 2; there are 3, of steps 1 to 20"):
        read_dumps(tmp_path, steps=[1, 2])


def test_a_step_without_routes_takes_those_of_the_others(tmp_path):
    write_step(tmp_path, 1, [sequence()])
    write_step(tmp_path, 2, [sequence()], layers=(0, 1), top_k=8)
    assert read_dumps(tmp_path).schema.metadata[b"top_k"] == b"8"
    write_step(tmp_path, 3, [sequence()], layers=(0, 2), top_k=8)
    with pytest.raises(TokenDumpError, match="files differ in layers"):
        read_dumps(tmp_path)


def test_an_empty_step_is_a_dump_without_rows(tmp_path):
    write_step(tmp_path, 1, [])
    assert read_dumps(tmp_path).num_rows == 0


def test_unreadable_dumps_say_so(tmp_path):
    with pytest.raises(TokenDumpError, match=r"no token dumps: the run needs tim\.dump\.tokens_per_step"):
        read_dumps(tmp_path)
    path = write_step(tmp_path, 1, [sequence()])
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"format": "2"}), path)
    with pytest.raises(TokenDumpError, match="has format 2"):
        read_dumps(tmp_path)
    pq.write_table(table.drop_columns(["turn"]), path)
    with pytest.raises(TokenDumpError, match="other columns"):
        read_dumps(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TokenDumpError, match=r"step_000001\.parquet cannot be read"):
        read_dumps(tmp_path)


def test_columns_of_unequal_length_are_refused(tmp_path):
    with pytest.raises(TokenDumpError, match="row 4 have lengths"):
        write_step(tmp_path, 1, [sequence(4, kept_N=np.ones(2, bool))])


def test_whole_sequences_within_the_budget():
    lengths = [0, 5, 40, 5, 5, 100, 5]
    chosen = choose_sequences(lengths, 50, seed=0)
    assert sum(lengths[number] for number in chosen) <= 50
    assert 0 not in chosen
    assert 5 not in chosen
    assert chosen == choose_sequences(lengths, 50, seed=0)
    assert choose_sequences(lengths, 1000, seed=0) == [1, 2, 3, 4, 5, 6]
    assert choose_sequences(lengths, 4, seed=0) == []
    assert choose_sequences([], 10, seed=0) == []
    many = [{*choose_sequences([10] * 100, 50, seed=step)} for step in range(2)]
    assert many[0] != many[1], "another step, other sequences"
    assert 2 in choose_sequences(lengths, 40, seed=0, first=[2])


def test_a_flipped_bit_is_refused_or_changes_nothing_that_was_measured(tmp_path):
    noise = np.random.default_rng(0)
    sequences = [
        sequence(row, 20, **{f"{n}_N": -noise.exponential(1.0, 20).astype(np.float32) for n in LOG_PROBS})
        for row in range(8)
    ]
    path = write_step(tmp_path, 1, sequences, layers=(0,), top_k=2)
    whole, good = path.read_bytes(), read_dumps(tmp_path)
    # what lies before the footer are the pages; the last eight bytes say how long the footer is
    pages = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for bit in noise.integers(8 * len(whole), size=600):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        try:
            table = read_dumps(tmp_path)
        except TokenDumpError:
            refused += 1
        else:
            assert bit // 8 >= pages or table.equals(good), f"bit {bit} was read as another value"
    assert refused > 300


def test_a_file_of_another_name_is_no_dump(tmp_path):
    path = write_step(tmp_path, 3, [sequence()])
    shutil.copy(path, path.with_name("step_000003 (copy).parquet"))
    assert dumped_steps(tmp_path) == [3]
    assert len(read_dumps(tmp_path)) == 3


@pytest.mark.parametrize(("key", "text"), [("layers", "[0,"), ("top_k", " "), ("correction", "{'a'")])
def test_a_damaged_description_is_refused(tmp_path, key, text):
    path = write_step(tmp_path, 1, [sequence()])
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, key.encode(): text.encode()}), path)
    with pytest.raises(TokenDumpError, match=r"step_000001\.parquet.*description is damaged"):
        read_dumps(tmp_path)
