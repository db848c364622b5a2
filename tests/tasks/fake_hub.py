"""A hub of small files in the published files' real schemas, behind the two calls of huggingface_hub that ask for one:
`get_hf_file_metadata` stands for the network, `hf_hub_download` (local files only) for the hub's cache.

The download itself is tested against a server: test_published_download.py."""

import hashlib
import json
from dataclasses import replace
from types import MappingProxyType

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import errors
from huggingface_hub.file_download import HfFileMetadata

from verl_tim.tasks.published import sources
from verl_tim.tasks.published.prompt import fill

COMMITS = {name: hashlib.sha1(name.encode()).hexdigest() for name in sources.PUBLISHED}
MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
REWARD_MODEL = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])

SANITY = [
    ("What is $\\frac12+\\frac14$?", "\\frac{3}{4}"),
    ("Solve $x^2=4$.", "2,-2"),
    ("Which day follows Monday?", "\\text{Tuesday}"),
]
DAPO = [(f"What is {n} times {n}?", str(n * n)) for n in range(2, 22)]
AIME = [(f"Find the {n}-th answer.", 25 + n) for n in range(30)]
GSM8K = {
    "train": [(f"Tom has {n} apples and buys 1,000. How many?", f"{n}+1000=<<{n}+1000={n + 1000}>>{n + 1000}\n#### "
               f"{n + 1000:,}") for n in range(12)],
    "test": [(f"Ann has {n} pears and eats one. How many?", f"{n}-1={n - 1}\n#### {n - 1}") for n in range(3, 9)],
}  # fmt: skip


def sanity_rows():
    for index, (problem, answer) in enumerate(SANITY):
        yield {
            "data_source": "math",
            "prompt": [{"content": f"{problem} Reason, and box the answer: \\boxed{{}}.", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"index": index, "split": "train"},
        }


def dapo_rows(copies=5, conflict=True):
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": fill("answer_line", problem), "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{index:08d}-uuid"},
        }
        for index, (problem, answer) in enumerate(DAPO)
    ]
    rows = rows * copies
    if conflict:
        for answer in ("7", "8"):
            rows.insert(
                13,
                {
                    **rows[0],
                    "prompt": [{"content": fill("answer_line", "Guess a number."), "role": "user"}],
                    "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
                },
            )
    return rows


def write(path, rows, schema=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
    return path


VERL_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", MESSAGES),
        ("ability", pa.string()),
        ("reward_model", REWARD_MODEL),
        ("extra_info", pa.struct([("index", pa.string())])),
    ]
)


class FakeHub:
    """Files under `<root>/<repo>/snapshots/<commit>/`, the layout of the hub's cache."""

    def __init__(self, root, monkeypatch):
        self.root = root
        self.calls = []
        self.error = None
        self._monkeypatch = monkeypatch
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.hf_hub_download)
        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", self.get_hf_file_metadata)
        self.put("sanity_r1d", "train/math_1460.parquet", sanity_rows())
        self.put("dapo_math", "data/dapo-math-17k.parquet", dapo_rows(), VERL_SCHEMA)
        self.put(
            "aime24",
            "aime_2024_problems.parquet",
            [{"ID": f"2024-I-{n}", "Problem": p, "Solution": "...", "Answer": a} for n, (p, a) in enumerate(AIME)],
        )
        self.put(
            "aime25",
            "test.jsonl",
            [{"problem": f"In 2025: {p}", "answer": str(a), "id": str(n)} for n, (p, a) in enumerate(AIME)],
        )
        for split, rows in GSM8K.items():
            self.put("gsm8k", f"main/{split}-00000-of-00001.parquet", [{"question": q, "answer": a} for q, a in rows])

    def folder(self, name):
        source = sources.PUBLISHED[name]
        commit = source.revision if sources.is_commit(source.revision) else COMMITS[name]
        return self.root / source.repo.replace("/", "--") / "snapshots" / commit

    def put(self, name, path, rows, schema=None):
        """Publish a file, and pin its checksum where the table pins one."""
        file = write(self.folder(name) / path, rows, schema)
        source = sources.PUBLISHED[name]
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        files = tuple(
            replace(each, sha256=digest) if each.path == path and each.sha256 is not None else each
            for each in source.files
        )
        table = {**sources.PUBLISHED, name: replace(source, files=files)}
        self._monkeypatch.setattr(sources, "PUBLISHED", MappingProxyType(table))

    def hf_hub_download(self, *, repo_id, filename, repo_type, revision, local_files_only):
        assert (repo_type, local_files_only) == ("dataset", True)
        path = self.root / repo_id.replace("/", "--") / "snapshots" / revision / filename
        if self.error is not None or not path.is_file():
            raise errors.LocalEntryNotFoundError("not in the cache")
        return str(path)

    def get_hf_file_metadata(self, url):
        """The real client's answers: the commit, or its errors."""
        self.calls.append(url)
        if self.error is not None:
            raise self.error
        repo, _, rest = url.partition("/datasets/")[2].partition("/resolve/")
        revision, _, filename = rest.partition("/")
        folder = self.root / repo.replace("/", "--") / "snapshots"
        if not folder.is_dir():
            raise errors.RepositoryNotFoundError("404", response=response(404))
        (commit,) = (each.name for each in folder.iterdir())
        if revision not in (commit, "main"):
            raise errors.RevisionNotFoundError("404", response=response(404))
        path = folder / commit / filename
        if not path.is_file():
            raise errors.RemoteEntryNotFoundError("404", response=response(404))
        return HfFileMetadata(commit, "e" * 40, url, path.stat().st_size, None)


def response(status):
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid"))
