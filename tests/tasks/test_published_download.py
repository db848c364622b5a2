"""The hub's real client and the download against a server on this machine: an interrupted download goes on where it
stopped."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl_tim.tasks.locked import locked
from verl_tim.tasks.published import download as downloads
from verl_tim.tasks.published.download import DamagedDownload

COMMIT = "c" * 40
# large enough that the client writes several chunks before the break
PROBLEMS = 60_000
CONTENT = "".join(
    json.dumps({"problem": f"What is {n} times {n}? {'x' * 400}", "answer": str(n * n), "id": str(n)}) + "\n"
    for n in range(PROBLEMS)
).encode()
BREAK_AT = 15_000_000


class Hub(BaseHTTPRequestHandler):
    """Serves one file at one commit; breaks off after BREAK_AT bytes while `broken`."""

    broken = True
    understands_ranges = True
    # where further connections break off, one each
    breaks: list = []  # noqa: RUF012
    ranges: list = []  # noqa: RUF012

    def do_HEAD(self):
        self._headers(200, len(CONTENT))

    def do_GET(self):
        if "/resolve/" not in self.path:  # the client asks for a list for its user agent
            self.send_error(404)
            return
        wanted = self.headers.get("Range") if Hub.understands_ranges else None
        Hub.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        self._headers(206 if wanted else 200, len(CONTENT) - start)
        stop = BREAK_AT if Hub.broken else Hub.breaks.pop(0) if Hub.breaks else len(CONTENT)
        self.wfile.write(CONTENT[start:stop])
        self.close_connection = True

    def _headers(self, status, length):
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", f'"{hashlib.sha256(CONTENT).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    Hub.broken, Hub.ranges = True, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def run(server, tmp_path, *more):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        "HF_ENDPOINT": server,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    arguments = ["data", "aime25", "--revision", "main", "--cache-dir", str(tmp_path / "cache"), "--json", *more]
    return subprocess.run(
        [sys.executable, "-m", "verl_tim.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


def part_of(tmp_path):
    return tmp_path / "cache/downloads/math-ai--aime25" / COMMIT / "test.jsonl.part"


@pytest.mark.slow
def test_an_interrupted_download_goes_on_where_it_stopped(server, tmp_path):
    broken = run(server, tmp_path)
    assert broken.returncode == 2, broken.stderr
    assert "cannot be fetched from the Hugging Face hub" in " ".join(broken.stderr.split())
    assert json.loads(broken.stdout)["error"]["exit_code"] == 2
    assert not list((tmp_path / "cache").rglob("*.parquet"))
    assert not list((tmp_path / "cache").rglob("test.jsonl")), "no half file under its name"
    kept = part_of(tmp_path).stat().st_size
    assert 0 < kept <= BREAK_AT

    Hub.broken, Hub.ranges = False, []
    whole = run(server, tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert Hub.ranges == [f"bytes={kept}-"], "only the rest was asked for"
    assert not part_of(tmp_path).exists()
    manifest = json.loads(whole.stdout)["manifest"]
    assert manifest["sources"]["validation"] == {
        "path": "test.jsonl",
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "repo": "math-ai/aime25",
        "revision": "main",
        "commit": COMMIT,
    }
    assert manifest["counts"]["validation"]["rows_written"] == PROBLEMS

    Hub.ranges = []
    again = run("http://127.0.0.1:9", tmp_path)
    assert again.returncode == 0, "found again without the hub"
    assert again.stdout == whole.stdout
    other = run("http://127.0.0.1:9", tmp_path, "--revision", COMMIT, "--prompt-style", "bare")
    assert other.returncode == 0, "another style of the same commit needs no second download"


def fetch(server, target, **settings):
    from verl_tim.tasks.published.download import download

    settings = {"size": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest(), "progress": False, **settings}
    download(f"{server}/datasets/a/b/resolve/{COMMIT}/test.jsonl", target, **settings)


def test_what_is_there_is_kept_and_checked(server, tmp_path):
    Hub.broken = False
    target = tmp_path / "test.jsonl"
    part = tmp_path / "test.jsonl.part"
    part.write_bytes(CONTENT[:1000])
    fetch(server, target)
    assert target.read_bytes() == CONTENT
    assert Hub.ranges == ["bytes=1000-"]
    fetch(server, target)
    assert Hub.ranges == ["bytes=1000-"], "there already"


def test_a_server_without_ranges_sends_all_of_it_again(server, tmp_path, monkeypatch):
    Hub.broken = False
    monkeypatch.setattr(Hub, "understands_ranges", False)
    part = tmp_path / "test.jsonl.part"
    part.write_bytes(b"other" * 1000)
    fetch(server, tmp_path / "test.jsonl")
    assert (tmp_path / "test.jsonl").read_bytes() == CONTENT


def test_damage_is_not_kept(server, tmp_path):
    Hub.broken = False
    target, part = tmp_path / "test.jsonl", tmp_path / "test.jsonl.part"
    part.write_bytes(b"x" * 1000)
    with pytest.raises(DamagedDownload, match=r"has SHA-256 .*, not"):
        fetch(server, target)
    assert not target.exists()
    assert not part.exists()
    with pytest.raises(DamagedDownload, match=f"has {len(CONTENT)} bytes, not 10"):
        fetch(server, target, size=10)
    fetch(server, target)
    assert target.read_bytes() == CONTENT


def test_a_broken_connection_is_taken_up_again_in_the_same_call(server, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(Hub, "breaks", [5_000_000, 9_000_000])
    Hub.broken = False
    fetch(server, tmp_path / "test.jsonl")
    assert (tmp_path / "test.jsonl").read_bytes() == CONTENT
    assert [words is None for words in Hub.ranges] == [True, False, False]


def test_two_at_once_fetch_once(server, tmp_path):
    Hub.broken = False
    target = tmp_path / "test.jsonl"
    threads = [threading.Thread(target=fetch, args=(server, target)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == CONTENT
    assert len(Hub.ranges) == 1
    assert not (tmp_path / "test.jsonl.part").exists()


def test_who_waited_for_a_damaged_one_begins_anew(server, tmp_path):
    """The one who held the partial file removes it; the next must not fill a file that has no name any more."""
    Hub.broken = False
    target, part = tmp_path / "test.jsonl", tmp_path / "test.jsonl.part"
    with ThreadPoolExecutor(1) as pool:
        with locked(part):
            waiting = pool.submit(fetch, server, target)
            threading.Event().wait(0.1)
            assert not waiting.done(), "it waits"
            part.unlink()
        waiting.result(30)
    assert target.read_bytes() == CONTENT
    assert not part.exists()
