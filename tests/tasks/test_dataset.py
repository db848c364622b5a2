"""Data sets: reproducible to the byte, disjoint, scored exactly by what their rows carry, in the schema that verl
reads."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from verl_tim.tasks.catalog import TASKS
from verl_tim.tasks.dataset import build_dataset
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.problems import pool_of
from verl_tim.tasks.reward import compute_score


def make(tmp_path, task="chain_sum", **changes):
    settings = {"train_size": 60, "val_size": 20, "seed": 0, "progress": False, "cache_dir": tmp_path, **changes}
    return build_dataset(task, **settings)


def rows_of(path):
    return pq.read_table(path).to_pylist()


def questions_of(path):
    return [row["prompt"][-1]["content"] for row in rows_of(path)]


def wrong_answer(truth):
    return str(int(float(truth)) + 1)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_row_carries_what_its_verifier_needs(tmp_path, task):
    paths = make(tmp_path, task)
    rows = rows_of(paths.train) + rows_of(paths.validation)
    assert len(rows) == 80
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": row["extra_info"]["question"]}]
        truth = row["reward_model"]["ground_truth"]
        assert compute_score(row["data_source"], truth, truth, row["extra_info"]) == 1.0
        assert compute_score(row["data_source"], wrong_answer(truth), truth, row["extra_info"]) < 1.0


@pytest.mark.parametrize("task", sorted(TASKS))
def test_equal_settings_give_equal_bytes(tmp_path, task):
    first, second = (make(tmp_path, task, out_dir=tmp_path / name) for name in "ab")
    assert first.train.read_bytes() == second.train.read_bytes()
    assert first.validation.read_bytes() == second.validation.read_bytes()
    assert first.card.read_bytes() == second.card.read_bytes()


def test_a_row_does_not_depend_on_how_many_follow(tmp_path):
    few, many = make(tmp_path), make(tmp_path, train_size=90, val_size=30)
    assert rows_of(many.train)[:60] == rows_of(few.train)
    assert rows_of(many.validation)[:20] == rows_of(few.validation)


def test_no_problem_occurs_twice_nor_in_both_files_of_any_seeds(tmp_path):
    sets = [make(tmp_path, "products", seed=seed) for seed in range(4)]
    for paths in sets:
        assert len(set(questions_of(paths.train))) == 60
        assert len(set(questions_of(paths.validation))) == 20
    train = {question for paths in sets for question in questions_of(paths.train)}
    validation = {question for paths in sets for question in questions_of(paths.validation)}
    assert not train & validation
    assert {pool_of(question) for question in train} == {"train"}
    assert {pool_of(question) for question in validation} == {"validation"}
    assert questions_of(sets[0].train) != questions_of(sets[1].train)


def test_neighbouring_seeds_are_not_the_same_stream_shifted(tmp_path):
    # reasoning-gym draws entry i of seed s from s + i
    first, second = (set(questions_of(make(tmp_path, "gsm_symbolic", seed=seed).train)) for seed in (0, 1))
    assert len(first & second) < 3


def test_difficulty_reaches_the_generator(tmp_path):
    paths = make(
        tmp_path, difficulty=OmegaConf.create({"min_terms": 5, "max_terms": 5, "min_digits": 3, "max_digits": 3})
    )
    for question in questions_of(paths.train):
        terms = [word for word in question.split() if word.isdigit()]
        assert [len(term) for term in terms] == [3] * 5


def test_answer_tags_style_asks_for_them_and_is_scored_by_them(tmp_path):
    row = rows_of(make(tmp_path, prompt_style="answer_tags").train)[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert "<answer>" in row["prompt"][0]["content"]
    truth = row["reward_model"]["ground_truth"]
    assert compute_score(row["data_source"], f"So 17.\n<answer>{truth}</answer>", truth, row["extra_info"]) == 1.0


def test_card_records_seed_difficulty_and_versions(tmp_path):
    paths = make(tmp_path, seed=7)
    card = json.loads(paths.card.read_text())
    assert card["spec"]["seed"] == 7
    assert card["spec"]["difficulty"]["max_digits"] == TASKS["chain_sum"].difficulty["max_digits"]
    assert set(card["spec"]["versions"]) == {"reasoning-gym", "pyarrow"}
    assert set(card["files"]) == {"train.parquet", "validation.parquet"}


def test_cache_is_found_again_and_guards_its_files(tmp_path):
    paths = make(tmp_path)
    stamp = paths.train.stat().st_mtime_ns
    assert make(tmp_path).train.stat().st_mtime_ns == stamp
    assert make(tmp_path, seed=1).folder != paths.folder
    paths.train.write_bytes(paths.train.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"train\.parquet changed since"):
        make(tmp_path)
    assert not [path for path in paths.folder.parent.iterdir() if path.name.startswith(".")]


def test_out_dir_of_other_settings_is_kept_unless_told(tmp_path):
    out_dir = tmp_path / "mine"
    make(tmp_path, out_dir=out_dir)
    with pytest.raises(InputError, match="other settings"):
        make(tmp_path, out_dir=out_dir, seed=1)
    assert json.loads(make(tmp_path, out_dir=out_dir, seed=1, overwrite=True).card.read_text())["spec"]["seed"] == 1
    with pytest.raises(InputError, match="not enough distinct"):
        make(tmp_path, out_dir=out_dir, difficulty={"min_terms": 1, "max_terms": 1}, overwrite=True)
    assert json.loads((out_dir / "dataset.json").read_text())["spec"]["seed"] == 1, "a failed build leaves the old one"
    shutil.rmtree(out_dir)
    out_dir.mkdir()
    assert make(tmp_path, out_dir=out_dir).train.exists(), "an empty folder may be filled"
    shutil.rmtree(out_dir)
    out_dir.mkdir()
    (out_dir / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=r"no dataset\.json"):
        make(tmp_path, out_dir=out_dir, overwrite=True)
    assert (out_dir / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sudoku2"}, r"unknown task 'sudoku2'; known tasks: basic_arithmetic, chain_sum, "),
        ({"train_size": 0}, "train_size: must be an integer of at least 1"),
        ({"val_size": -1}, "val_size: must be an integer of at least 0"),
        ({"train_size": 10.0}, "train_size: must be an integer"),
        ({"seed": -1}, "seed: must be"),
        ({"difficulty": {"digits": 3}}, "no setting 'digits'; it has .*max_digits"),
        ({"difficulty": {"min_terms": 9, "max_terms": 2}}, "refuses .*max_terms must be >= min_terms"),
        ({"prompt_style": "loud"}, "known styles: bare, answer_tags"),
    ],
)
def test_bad_settings_are_named(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        make(tmp_path, **changes)
    assert not list(tmp_path.rglob("*.parquet"))


def test_too_few_distinct_problems_is_an_error_that_says_how_many_there_are(tmp_path):
    # one-digit sums and differences of two terms: 200 problems in all
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(InputError, match=r"not enough distinct problems .*of 500 train"):
        make(tmp_path, train_size=500, difficulty=tiny)
    assert not list(tmp_path.rglob("*"))[1:], "a failed build leaves nothing behind"


def test_verl_reads_the_files(tmp_path):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    paths = make(tmp_path)
    config = OmegaConf.create({"cache_dir": str(tmp_path / "verl"), "filter_overlong_prompts": False})
    dataset = RLHFDataset(str(paths.train), tokenizer=None, config=config)
    row = dataset[3]
    assert len(dataset) == 60
    assert row["index"] == 3
    assert row["raw_prompt"][0]["role"] == "user"
    assert row["data_source"] == "reasoning_gym/chain_sum"


def test_settings_may_come_from_hydra_with_lists_in_them(tmp_path):
    difficulty = {"operators": ["*"], "allow_parentheses": False, "min_terms": 2, "max_terms": 2, "max_digits": 2}
    paths = make(tmp_path, "basic_arithmetic", difficulty=OmegaConf.create(difficulty))
    assert all(" * " in question for question in questions_of(paths.train))
    assert make(tmp_path, "basic_arithmetic", difficulty=difficulty).folder == paths.folder
