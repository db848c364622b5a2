"""`~` in paths: that of a user who does not exist is told by its key, and no folder of that name is made."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.home import expanded, of_nobody

GONE = "~no_such_user_here/x"
runner = CliRunner()


def test_a_home_is_expanded_and_that_of_nobody_stays(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert expanded("~/x") == Path("/home/of/mine/x")
    assert expanded(Path("x~")) == Path("x~")
    assert expanded(GONE) == Path(GONE)
    assert [of_nobody(path) for path in (GONE, Path(GONE), "~/x", "x", "./~x")] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("words", "key", "problem"),
    [
        (["train", "--dry-run", f"tim.run_dir='{GONE}'"], "tim.run_dir", "nobody here has that home"),
        (["train", "--dry-run", f"tim.cache_dir='{GONE}'"], "tim.cache_dir", "nobody here has that home"),
        (["train", "--dry-run", f"trainer.default_local_dir='{GONE}'", "trainer.save_freq=1"],
         "trainer.default_local_dir", "nobody here has that home"),
        (["train", "--dry-run", "-m", "data.seed=1,2", f"tim.run_dir='{GONE}'"],
         "tim.run_dir", "nobody here has that home"),
        (["train", "--dry-run", f"data.train_files='{GONE}.parquet'"], "data.train_files", f"{GONE}.parquet"),
        (["train", "--dry-run", f"recipe={GONE}.yaml"], "recipe", f"{GONE}.yaml"),
        (["doctor", f"{GONE}.yaml"], "", f"{GONE}.yaml"),
        (["plan", f"{GONE}.yaml"], "", f"{GONE}.yaml"),
        (["compare", GONE], "RUN", GONE),
        (["report", GONE], "RUN", GONE),
        (["baseline", GONE], "RUN", GONE),
        (["calibrate", GONE, GONE], "", GONE),
        (["data", "chain_sum", "--cache-dir", GONE], "--cache-dir", "nobody here has that home"),
        (["data", "chain_sum", "--out", GONE], "--out", "nobody here has that home"),
        (["evidence", "pack-models", "--cache-dir", GONE], "--cache-dir", "nobody here has that home"),
    ],
)  # fmt: skip
def test_every_place_that_takes_a_path_names_its_key(words, key, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert key in result.stderr
    assert problem in " ".join(result.stderr.split()), result.stderr
    assert not list(tmp_path.glob("~*"))
