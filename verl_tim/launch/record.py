"""`matrix.json`: which runs of a matrix's folder ended well; and the lock of whoever does runs there."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verl_tim.launch.errors import LaunchError
from verl_tim.launch.run_folder import KEY, write_whole

RECORD = "matrix.json"
_LOCK = ".matrix.lock"
# Keys of a run's place, name and upkeep: they decide nothing of what it computes.
_KEEPING = re.compile(
    r"""
    tim\.(run_dir | tracking\..* | restarts\..* | launch\..*)
    | trainer\.(experiment_name | project_name | save_freq | max_(actor|critic)_ckpt_to_keep)
    """,
    re.VERBOSE,
)


def read_record(folder: Path) -> dict[str, list[str]]:
    """Run -> the overrides that decide what it computes, of those below a folder that ended well; where the folder lies
    is none of them, so that the record may be carried to another machine.

    Raises:
        LaunchError: a damaged record.
    """
    path = folder / RECORD
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): deciding(words) for name, words in content.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise LaunchError.of(
            KEY,
            f"{path}, which says what has finished, cannot be read ({error})",
            "mend it, or remove it to have those runs done again",
        ) from error


def write_record(folder: Path, content: Mapping[str, Sequence[str]]) -> None:
    """Replace the record of a folder."""
    lasting = {name: deciding(words) for name, words in content.items()}
    write_whole(folder / RECORD, json.dumps(lasting, indent=2) + "\n")


def deciding(words: Sequence[str]) -> list[str]:
    """The overrides that decide what a run computes; of one key the last, as Hydra takes them."""
    return list({key: word for word in words if not _KEEPING.fullmatch(key := key_of(word))}.values())


def key_of(word: str) -> str:
    """The key that an override sets."""
    return word.lstrip("+").partition("=")[0]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A matrix's folder, for one command at a time: another would take a run under way for one that was cut off, and
    begin it anew.

    Raises:
        LaunchError: another command does runs of this folder, or it cannot be written to.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context((folder / _LOCK).open("a"))
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = f"another command is doing runs of {folder}"
            remedy = f"wait until it has ended, or give another folder: {KEY}=FOLDER"
            raise LaunchError.of(KEY, problem, remedy) from error
        except OSError as error:
            remedy = f"give a folder that can be written to and locked: {KEY}=FOLDER"
            raise LaunchError.of(KEY, f"{folder} cannot be taken: {error}", remedy) from error
        yield
