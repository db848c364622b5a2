"""Each way in which a data file cannot be used is told apart, with the key and the remedy."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_tim.tasks.checks import check_dataset
from verl_tim.tasks.dataset import build_dataset
from verl_tim.tasks.errors import InputError

ROW = {
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "data_source": "mine",
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_own_data_sets_pass(tmp_path):
    paths = build_dataset("chain_sum", tmp_path / "data", train_size=70, val_size=3, seed=0, progress=False)
    assert check_dataset(paths.train) == 70
    assert check_dataset(paths.validation, key="data.val_files") == 3


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.json"])
def test_any_data_in_verls_schema_passes(tmp_path, name):
    assert check_dataset(write(tmp_path / name, [ROW] * 5)) == 5


def test_columns_may_be_renamed_or_spared(tmp_path):
    row = {"question": ROW["prompt"], "data_source": "mine"}
    file = write(tmp_path / "rows.parquet", [row])
    assert check_dataset(file, prompt_key="question", needs_ground_truth=False) == 1


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
@pytest.mark.parametrize("column", sorted(ROW))
def test_a_missing_column_is_named(tmp_path, name, column):
    row = {key: value for key, value in ROW.items() if key != column}
    file = write(tmp_path / name, [row])
    with pytest.raises(InputError, match=rf"data\.val_files: .*{name} lacks column {column} \(it has .*verl reads"):
        check_dataset(file, key="data.val_files")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "1 + 1 ="}, "row 0: prompt is '1 \\+ 1 ='; verl needs a list of messages"),
        ({"prompt": []}, "row 0: prompt is"),
        ({"prompt": [{"text": "1 + 1 ="}]}, "row 0: prompt is"),
        ({"data_source": 3}, "row 0: data_source is 3; verl needs a string"),
        ({"reward_model": {"style": "rule"}}, "row 0: reward_model is .*ground_truth"),
        ({"reward_model": "2"}, "row 0: reward_model is '2'"),
    ],
)
def test_a_column_of_the_wrong_form_is_named(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        check_dataset(write(tmp_path / "rows.parquet", [{**ROW, **change}]))


def test_files_that_are_no_data_are_named(tmp_path):
    with pytest.raises(InputError, match=r"data\.train_files: .*gone\.parquet does not exist; .*verl-tim data"):
        check_dataset(tmp_path / "gone.parquet")
    with pytest.raises(InputError, match="is a folder"):
        check_dataset(tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(InputError, match="torn, or no parquet file"):
        check_dataset(tmp_path / "bad.parquet")
    (tmp_path / "rows.csv").write_text("prompt\n1")
    with pytest.raises(InputError, match=r"neither \.parquet nor"):
        check_dataset(tmp_path / "rows.csv")
    (tmp_path / "rows.jsonl").write_text('{"prompt": \n')
    with pytest.raises(InputError, match="one JSON object a line"):
        check_dataset(tmp_path / "rows.jsonl")
    (tmp_path / "list.json").write_text("[1, 2]\n")
    with pytest.raises(InputError, match="one JSON object a line"):
        check_dataset(tmp_path / "list.json")
    pq.write_table(pa.Table.from_pylist([ROW])[:0], tmp_path / "empty.parquet")
    with pytest.raises(InputError, match="has no rows"):
        check_dataset(tmp_path / "empty.parquet")
