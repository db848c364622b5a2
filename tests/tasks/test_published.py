"""Published data sets: the rows that verl and the reward read, one of each problem, from the bytes that are pinned."""

import csv
import json
import math

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import AIME, COMMITS, DAPO, GSM8K, SANITY, VERL_SCHEMA, dapo_rows, response, sanity_rows, write
from huggingface_hub import errors
from omegaconf import OmegaConf

from verl_tim.tasks.checks import check_dataset
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.math.reward import compute_score
from verl_tim.tasks.published import build, sources
from verl_tim.tasks.published.build import build_published
from verl_tim.tasks.published.prompt import STYLES, TEMPLATES, fill, unfill

SETS = sorted(sources.PUBLISHED)
ORIGINAL = sources.PUBLISHED
ANSWER_AS_ASKED = {"boxed": "\\boxed{%s}", "answer_line": "Answer: %s", "hash": "#### %s", "auto": "\\boxed{%s}"}


def make(tmp_path, name, **settings):
    return build_published(name, **{"cache_dir": tmp_path / "cache", "progress": False, **settings})


def rows_of(path):
    return pq.read_table(path).to_pylist()


def files_of(paths):
    return [path for path in (paths.train, paths.validation) if path is not None]


def card_of(paths):
    return json.loads(paths.card.read_text())


@pytest.mark.parametrize("name", SETS)
def test_rows_are_what_verl_and_the_reward_read(hub, tmp_path, name):
    paths = make(tmp_path, name)
    assert {path.stem for path in files_of(paths)} == set(sources.PUBLISHED[name].splits)
    for path in files_of(paths):
        rows = rows_of(path)
        assert check_dataset(path) == len(rows) > 0
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        for row in rows:
            assert row["data_source"] == sources.PUBLISHED[name].data_source
            assert [message["role"] for message in row["prompt"]] == ["user"]
            assert row["extra_info"]["question"] in row["prompt"][0]["content"]
            assert row["extra_info"]["split"] == path.stem
            truth = row["reward_model"]["ground_truth"]
            asked = ANSWER_AS_ASKED[row["extra_info"]["answer_format"]]
            for answer, score in ((truth, 1.0), ("7777", 0.0)):
                result = compute_score(row["data_source"], "so\n" + asked % answer, truth, row["extra_info"])
                assert result["score"] == score


@pytest.mark.parametrize("name", SETS)
def test_verl_reads_the_files(hub, tmp_path, name):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    paths = make(tmp_path, name)
    config = OmegaConf.create({"cache_dir": str(tmp_path / "verl"), "filter_overlong_prompts": False})
    dataset = RLHFDataset([str(path) for path in files_of(paths)], tokenizer=None, config=config)
    row = dataset[2]
    assert row["index"] == 2
    assert row["raw_prompt"][0]["role"] == "user"
    assert row["data_source"] == sources.PUBLISHED[name].data_source


def test_what_each_set_asks(hub, tmp_path):
    prompts = {name: rows_of(files_of(make(tmp_path, name))[0])[0]["prompt"][0]["content"] for name in SETS}
    assert prompts == {
        "sanity_r1d": f"{SANITY[0][0]} Reason, and box the answer: \\boxed{{}}.",
        "dapo_math": (
            "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 2 times 2?\n\n"
            'Remember to put your answer on its own line after "Answer:".'
        ),
        "aime24": f"{AIME[0][0]}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        "aime25": f"In 2025: {AIME[0][0]}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        "gsm8k": f'{GSM8K["train"][0][0]} Let\'s think step by step and output the final answer after "####".',
    }


def test_true_answers(hub, tmp_path):
    truths = {
        name: [row["reward_model"]["ground_truth"] for row in rows_of(files_of(make(tmp_path, name))[0])]
        for name in SETS
    }
    assert truths["sanity_r1d"] == [answer for _, answer in SANITY]
    assert truths["dapo_math"] == [answer for _, answer in DAPO]
    assert truths["aime24"] == truths["aime25"] == [str(answer) for _, answer in AIME]
    assert truths["gsm8k"] == [str(n + 1000) for n in range(12)], "without the thousands separator"


def test_copies_and_conflicting_answers_are_dropped_and_counted(hub, tmp_path):
    paths = make(tmp_path, "dapo_math")
    rows = rows_of(paths.train)
    assert [row["extra_info"]["question"] for row in rows] == [problem for problem, _ in DAPO]
    assert [row["extra_info"]["id"] for row in rows] == [f"{index:08d}-uuid" for index in range(20)]
    assert card_of(paths)["counts"]["train"] == {
        "rows_read": 102,
        "copies_dropped": 81,
        "problems_with_conflicting_answers_dropped": 1,
        "distinct_problems": 20,
        "rows_written": 20,
    }


def test_copies_may_differ_in_white_space_and_in_the_spelling_of_an_integer(hub, tmp_path):
    rows = dapo_rows(copies=1, conflict=False)[:1]
    again = {**rows[0], "prompt": [{"content": fill("answer_line", "What  is 2\ntimes 2?"), "role": "user"}]}
    again["reward_model"] = {"ground_truth": "04", "style": "rule"}
    hub.put("dapo_math", "data/dapo-math-17k.parquet", [*rows, again], VERL_SCHEMA)
    counts = card_of(make(tmp_path, "dapo_math"))["counts"]["train"]
    assert (counts["copies_dropped"], counts["problems_with_conflicting_answers_dropped"]) == (1, 0)


@pytest.mark.parametrize("name", SETS)
def test_manifest_says_where_every_byte_came_from(hub, tmp_path, name):
    card = card_of(make(tmp_path, name))
    source = sources.PUBLISHED[name]
    assert card["pinned"] is (name != "sanity_r1d")
    assert card["licence"] == source.licence
    assert card["inferred"] == list(source.inferred)
    for file in source.files:
        came_from = card["sources"][file.split]
        path = hub.folder(name) / file.path
        assert came_from["sha256"] == build.file_sha256(path)
        assert (came_from["repo"], came_from["path"]) == (source.repo, file.path)
        assert came_from["revision"] == source.revision
        assert came_from["commit"] == (source.revision if source.pinned else COMMITS[name])
    assert set(card["files"]) == {f"{split}.parquet" for split in source.splits}


def test_the_table_pins_what_is_known():
    for source in ORIGINAL.values():
        assert source.pinned or any("commit" in fact for fact in source.inferred), source.name
        for file in source.files:
            known = file.sha256 is not None
            assert known or not source.pinned or any("checksum" in fact for fact in source.inferred), source.name
            assert not known or (len(file.sha256) == 64 and source.pinned)


def test_found_again_without_a_network(hub, tmp_path):
    first = make(tmp_path, "sanity_r1d")
    hub.error = AssertionError("asked the hub")
    assert make(tmp_path, "sanity_r1d") == first
    hub.error = None
    assert make(tmp_path, "sanity_r1d", prompt_style="published") == first, "the set's own style, named"
    assert len(hub.calls) == 1
    make(tmp_path, "sanity_r1d", overwrite=True)
    assert len(hub.calls) == 2, "overwrite fetches anew"


def test_a_file_that_changed_is_not_used(hub, tmp_path):
    paths = make(tmp_path, "aime24")
    content = bytearray(paths.validation.read_bytes())
    content[len(content) // 2] ^= 1
    paths.validation.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"validation\.parquet changed since"):
        make(tmp_path, "aime24")
    make(tmp_path, "aime24", overwrite=True)
    assert make(tmp_path, "aime24") == paths


def test_an_interruption_leaves_nothing_that_looks_finished(hub, tmp_path, monkeypatch):
    real, written = build.pq.write_table, []

    def interrupted(table, path, **settings):
        if written:
            path.write_bytes(b"PAR1 half a file")
            raise KeyboardInterrupt
        written.append(path)
        real(table, path, **settings)

    monkeypatch.setattr(build.pq, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, "gsm8k")
    assert written, "the first of two files was whole"
    assert not list((tmp_path / "cache").rglob("*.parquet"))
    monkeypatch.setattr(build.pq, "write_table", real)
    paths = make(tmp_path, "gsm8k")
    assert (len(rows_of(paths.train)), len(rows_of(paths.validation))) == (12, 6)


def test_other_bytes_than_the_pinned_ones_are_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PUBLISHED", ORIGINAL)
    with pytest.raises(InputError, match=r"test\.jsonl has SHA-256 .* pinned one is b4e273c0.*fetch it again"):
        make(tmp_path, "aime25")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").rglob("*.parquet"))


def test_a_revision_of_the_users_own(hub, tmp_path):
    paths = make(tmp_path, "sanity_r1d", revision=COMMITS["sanity_r1d"])
    assert card_of(paths)["sources"]["train"]["commit"] == COMMITS["sanity_r1d"]
    assert paths.folder != make(tmp_path, "sanity_r1d").folder
    with pytest.raises(InputError, match=r"--revision: math-ai/aime25 has no revision 'v2'; give a commit"):
        make(tmp_path, "aime25", revision="v2")
    with pytest.raises(InputError, match="revision: must be a commit or branch"):
        make(tmp_path, "aime25", revision=" ")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.OfflineModeIsEnabled("offline"), "cannot be fetched .*not on this machine.*--from validation=FILE"),
        (httpx.ConnectError("refused"), "cannot be fetched .*ConnectError: refused"),
        (errors.GatedRepoError("403", response=response(403)), "hf auth login"),
        (errors.RepositoryNotFoundError("404", response=response(404)), "no such repository"),
        (errors.RemoteEntryNotFoundError("404", response=response(404)), "no such file at this revision"),
        (errors.HfHubHTTPError("500", response=response(500)), "cannot be fetched .*HfHubHTTPError: 500"),
        (ConnectionResetError("peer"), "cannot be fetched .*ConnectionResetError: peer"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_what_cannot_be_fetched(hub, tmp_path, error, message):
    hub.error = error
    with pytest.raises(InputError, match=message) as caught:
        make(tmp_path, "aime25")
    assert "math-ai/aime25@563bb840" in str(caught.value)
    hub.error = None
    make(tmp_path, "aime25")


def test_sizes_are_the_first_so_many_distinct_problems(hub, tmp_path):
    paths = make(tmp_path, "gsm8k", train_size=5, val_size=2)
    everything = make(tmp_path, "gsm8k")
    assert rows_of(paths.train) == rows_of(everything.train)[:5]
    assert rows_of(paths.validation) == rows_of(everything.validation)[:2]
    with pytest.raises(InputError, match="train_size: is 21, and dapo_math has 20"):
        make(tmp_path, "dapo_math", train_size=21)
    for size in (0, -1, 2.0, True):
        with pytest.raises(InputError, match="val_size: must be an integer of at least 1"):
            make(tmp_path, "gsm8k", val_size=size)


def test_styles(hub, tmp_path):
    for style in STYLES[1:]:
        row = rows_of(make(tmp_path, "dapo_math", prompt_style=style).train)[0]
        assert row["prompt"][0]["content"] == fill(style, DAPO[0][0])
    published, filled = (
        rows_of(make(tmp_path, "dapo_math", prompt_style=style).train) for style in ("published", "answer_line")
    )
    assert published == filled, "the template is that of the published prompts"
    with pytest.raises(InputError, match=r"prompt_style: .*bare problem and no published prompt"):
        make(tmp_path, "aime24", prompt_style="published")
    with pytest.raises(InputError, match=r"prompt_style: .*template is not known.*prompt_style=published"):
        make(tmp_path, "sanity_r1d", prompt_style="boxed")
    with pytest.raises(InputError, match=r"prompt_style: unknown style 'loud'; known styles: published, boxed"):
        make(tmp_path, "aime24", prompt_style="loud")


@pytest.mark.parametrize("style", sorted(TEMPLATES))
@pytest.mark.parametrize("problem", ["What is {x}?", "{problem}", "\\boxed{}", "%s {0}", 'after "Answer:".'])
def test_templates_come_off_again(style, problem):
    assert unfill(style, fill(style, problem)) == problem


def test_a_prompt_of_another_template_stays_whole(hub, tmp_path):
    rows = dapo_rows(copies=1, conflict=False)[:2]
    rows[1]["prompt"] = [{"content": "Plainly: what is 3 times 3?", "role": "user"}]
    hub.put("dapo_math", "data/dapo-math-17k.parquet", rows, VERL_SCHEMA)
    assert rows_of(make(tmp_path, "dapo_math").train)[1]["prompt"] == rows[1]["prompt"]
    with pytest.raises(InputError, match="problem 1 is a whole prompt"):
        make(tmp_path, "dapo_math", prompt_style="boxed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "no mark"}, "row 1: column answer has no answer behind ####"),
        ({"answer": "all of it\n#### "}, "row 1: column answer has no answer behind ####"),
        ({"answer": None}, "row 1: column answer is null"),
        ({"question": "  "}, "row 1: column question holds no problem"),
    ],
)
def test_rows_without_a_problem_or_an_answer(hub, tmp_path, change, message):
    rows = [{"question": "One?", "answer": "#### 1"}, {"question": "Two?", "answer": "#### 2", **change}]
    hub.put("gsm8k", "main/train-00000-of-00001.parquet", rows)
    with pytest.raises(InputError, match=message):
        make(tmp_path, "gsm8k")
    assert not list((tmp_path / "cache").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("rows", "schema", "message"),
    [
        ([{"q": "One?", "answer": "#### 1"}], None, r"lacks column question \(problem\); it has q, answer: say which"),
        ([], pa.schema([("question", pa.string()), ("answer", pa.string())]), "has no problem left"),
    ],
)
def test_files_of_another_schema(hub, tmp_path, rows, schema, message):
    hub.put("gsm8k", "main/train-00000-of-00001.parquet", rows, schema)
    with pytest.raises(InputError, match=message):
        make(tmp_path, "gsm8k")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "column prompt holds \\[\\]"),
        ([{"role": "user", "content": None}], "must be a text or a list of"),
    ],
)
def test_prompts_of_another_form(hub, tmp_path, prompt, message):
    row = {**dapo_rows(copies=1)[0], "prompt": prompt}
    hub.put("dapo_math", "data/dapo-math-17k.parquet", [row], VERL_SCHEMA)
    with pytest.raises(InputError, match=message):
        make(tmp_path, "dapo_math")


def test_a_struct_without_the_field(hub, tmp_path):
    rows = [{**row, "reward_model": {"style": "rule"}} for row in sanity_rows()]
    hub.put("sanity_r1d", "train/math_1460.parquet", rows)
    with pytest.raises(InputError, match=r"row 0: has no reward_model\.ground_truth"):
        make(tmp_path, "sanity_r1d")


def test_a_torn_file(hub, tmp_path):
    path = hub.folder("aime24") / "aime_2024_problems.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"aime24 validation: .* is torn"):
        make(tmp_path, "aime24")


def local_rows():
    return [{"q": f"What is {n}+1?", "a": str(n + 1), "key": f"k{n}"} for n in range(4)]


def local_file(folder, kind):
    path = folder / f"mine.{kind}"
    if kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, ["q", "a", "key"])
            writer.writeheader()
            writer.writerows(local_rows())
        return path
    return write(path, local_rows())


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_local_files_with_a_column_mapping(tmp_path, kind):
    paths = make(
        tmp_path,
        "files",
        files={"train": local_file(tmp_path, kind)},
        columns={"problem": "q", "answer": "a", "id": "key"},
        data_source="mine",
    )
    rows = rows_of(paths.train)
    assert paths.validation is None
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["extra_info"]["id"] for row in rows] == ["k0", "k1", "k2", "k3"]
    assert rows[0]["data_source"] == "mine"
    assert rows[0]["prompt"][0]["content"] == fill("boxed", "What is 0+1?")
    assert card_of(paths)["sources"]["train"]["path"].endswith(f"mine.{kind}")


def test_a_changed_local_file_is_another_data_set(tmp_path):
    settings = {"columns": {"problem": "q", "answer": "a"}}
    file = local_file(tmp_path, "jsonl")
    first = make(tmp_path, "files", files={"train": file}, **settings)
    assert make(tmp_path, "files", files={"train": file}, **settings) == first
    file.write_text(file.read_text() + json.dumps({"q": "Five?", "a": 5}) + "\n")
    second = make(tmp_path, "files", files={"train": file}, **settings)
    assert second.folder != first.folder
    assert len(rows_of(second.train)) == 5


def test_a_local_copy_of_a_published_set_needs_no_hub(hub, tmp_path):
    hub_made = make(tmp_path, "gsm8k")
    file = hub.folder("gsm8k") / "main/test-00000-of-00001.parquet"
    hub.error = AssertionError("asked the hub")
    local = make(tmp_path, "gsm8k", files={"validation": file})
    assert rows_of(local.validation) == rows_of(hub_made.validation)
    assert local.train is None


def test_answers_inside_solutions(tmp_path):
    file = write(tmp_path / "s.jsonl", [{"problem": "Half?", "solution": "so $\\boxed{\\frac{1}{2}}$."}])
    settings = {"files": {"train": file}, "columns": {"answer": "solution"}}
    paths = make(tmp_path, "files", answer="boxed", **settings)
    assert rows_of(paths.train)[0]["reward_model"]["ground_truth"] == "\\frac{1}{2}"
    with pytest.raises(InputError, match="row 0: column solution has no answer behind ####"):
        make(tmp_path, "files", answer="after_hash", **settings)


def test_a_prompt_of_several_messages_stays_as_it_is(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One plus one?"}]
    file = write(tmp_path / "chat.jsonl", [{"problem": messages, "answer": 2}])
    paths = make(tmp_path, "files", files={"train": file}, prompt_style="published")
    row = rows_of(paths.train)[0]
    assert row["prompt"] == messages
    assert row["extra_info"]["answer_format"] == "auto"
    with pytest.raises(InputError, match="whole prompt"):
        make(tmp_path, "files", files={"train": file})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"files": {"test": "F"}}, "--from: unknown split 'test'; known splits: train, validation"),
        ({"files": {}}, "--from: no file given"),
        ({"files": {"train": "absent.csv"}}, "--from train: absent.csv does not exist; give a file of .parquet"),
        ({"files": {"train": "."}}, "--from train: . is a folder"),
        ({"columns": {"question": "q"}}, "--column: unknown role 'question'; known roles: problem, answer, id"),
        ({"columns": {"problem": "Q"}}, r"lacks column Q \(problem\), answer \(answer\); it has q, a, key: .*--column"),
        ({"answer": "last"}, "--answer: unknown rule 'last'; known rules: text, after_hash, boxed"),
        ({"revision": "main"}, "--revision: local files have none"),
    ],
)
def test_bad_local_input(tmp_path, settings, message):
    from pathlib import Path

    file = local_file(tmp_path, "jsonl")
    files = {
        split: Path(str(file) if path == "F" else path) for split, path in settings.pop("files", {"train": "F"}).items()
    }
    with pytest.raises(InputError, match=message):
        make(tmp_path, "files", files=files, **settings)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", r"none of \.parquet, \.jsonl, \.json, \.csv"),
        ("a.jsonl", "[1]\n", "line 1 is no JSON object"),
        ("a.jsonl", '{"problem": "p", "answer": "1"}\n{"problem": ', "line 2 is no JSON: "),
        ("a.jsonl", "", "has no rows"),
        ("a.csv", "problem,answer\np,\n", "row 0: column answer is empty"),
        ("a.csv", 'problem,answer\np,"1', "is no csv"),
        ("a.csv", "problem,answer\np\n", "row 0: column answer is null"),
        ("a.jsonl", '{"problem": "p", "answer": true}\n', "holds True; a true answer is a text or a number"),
        ("a.jsonl", '{"problem": 5, "answer": 1}\n', "column problem holds 5; it must be a text or a list"),
        ("a.jsonl", '{"problem": "p", "answer": "1"}\n{"problem": "p"}\n', "row 1: has no answer; it has problem"),
        ("a.parquet", "PAR1", "torn, or no parquet file"),
    ],
)
def test_bad_local_content(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        make(tmp_path, "files", files={"train": file})


def test_options_of_files_do_not_go_with_a_published_set(hub, tmp_path):
    with pytest.raises(InputError, match="those of gsm8k are known"):
        make(tmp_path, "gsm8k", columns={"problem": "q"})
    with pytest.raises(InputError, match="unknown published data set 'gsm9k'; known sets: aime24, "):
        make(tmp_path, "gsm9k")


def test_equal_settings_give_equal_bytes(hub, tmp_path):
    first, second = (make(tmp_path, "dapo_math", out_dir=tmp_path / name) for name in "ab")
    assert first.train.read_bytes() == second.train.read_bytes()
    assert first.card.read_bytes() == second.card.read_bytes()


def test_a_number_of_the_csv_or_json_kind_is_its_text(tmp_path):
    file = write(tmp_path / "n.jsonl", [{"problem": f"p{n}", "answer": n} for n in (7, 0.5, 1e20)])
    truths = [
        row["reward_model"]["ground_truth"] for row in rows_of(make(tmp_path, "files", files={"train": file}).train)
    ]
    assert truths[0] == "7"
    assert all(math.isclose(float(truth), value) for truth, value in zip(truths, (7, 0.5, 1e20), strict=True))
