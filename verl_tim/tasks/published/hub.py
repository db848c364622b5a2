"""One file of a repository on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_tim.tasks.artifact import file_sha256
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.published.download import DamagedDownload, download
from verl_tim.tasks.published.sources import HubFile, PublishedSet, is_commit


@dataclass(frozen=True)
class FetchedFile:
    """A file on this machine, and where it came from."""

    path: Path
    sha256: str
    commit: str


def fetch(source: PublishedSet, file: HubFile, folder: Path, *, progress: bool = True) -> FetchedFile:
    """The file at the set's revision.

    Looked for in the hub's own cache (HF_HOME) and in `folder`, where nothing of a pinned revision needs a network;
    else downloaded into `folder/<repository>/<commit>/`. An interrupted download goes on where it stopped.

    Raises:
        InputError: no network, no such repository, revision or file, a repository that asks for a login, or bytes that
            are not those that are pinned.
    """
    where = f"{source.repo}@{source.revision}:{file.path}"
    with _as_input_errors(source, file, where):
        path, commit = _local(source, file, source.revision, folder), source.revision
        if path is None:
            path, commit = _from_network(source, file, folder, where, progress=progress)
    digest = file_sha256(path)
    if file.sha256 is not None and digest != file.sha256:
        raise InputError(
            f"{where}: {path} has SHA-256 {digest}, and the pinned one is {file.sha256}; this copy is damaged: remove "
            "it and fetch it again"
        )
    return FetchedFile(path, digest, commit)


def _local(source: PublishedSet, file: HubFile, commit: str, folder: Path) -> Path | None:
    """A copy of one commit's file on this machine."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not is_commit(commit):
        return None
    with contextlib.suppress(LocalEntryNotFoundError):
        return Path(
            huggingface_hub.hf_hub_download(
                repo_id=source.repo, filename=file.path, repo_type="dataset", revision=commit, local_files_only=True
            )
        )
    path = _place(source, file, commit, folder)
    return path if path.is_file() else None


def _from_network(source: PublishedSet, file: HubFile, folder: Path, where: str, *, progress: bool) -> tuple[Path, str]:
    import huggingface_hub

    metadata = huggingface_hub.get_hf_file_metadata(
        huggingface_hub.hf_hub_url(source.repo, file.path, repo_type="dataset", revision=source.revision)
    )
    commit = metadata.commit_hash or ""
    if not is_commit(commit) or (is_commit(source.revision) and commit != source.revision):
        raise InputError(f"{where}: the server names commit {commit!r}; see that HF_ENDPOINT is a hub")
    path = _local(source, file, commit, folder)
    if path is None:
        path = _place(source, file, commit, folder)
        # of large files the hub's tag is the checksum
        tag = metadata.etag if metadata.etag and re.fullmatch(r"[0-9a-f]{64}", metadata.etag) else None
        url = huggingface_hub.hf_hub_url(source.repo, file.path, repo_type="dataset", revision=commit)
        download(url, path, size=metadata.size, sha256=file.sha256 or tag, progress=progress)
    return path, commit


def _place(source: PublishedSet, file: HubFile, commit: str, folder: Path) -> Path:
    return folder / source.repo.replace("/", "--") / commit / file.path


@contextlib.contextmanager
def _as_input_errors(source: PublishedSet, file: HubFile, where: str) -> Iterator[None]:
    import httpx  # what the hub's client speaks through; its errors are no OSErrors
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(f"{where}: the repository asks for a login; log in with `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"--revision: {source.repo} has no revision {source.revision!r}; give a commit") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(f"{where}: no such repository, or a private one; see `hf auth login`") from error
    except errors.RemoteEntryNotFoundError as error:
        raise InputError(
            f"{where}: the repository has no such file at this revision; leave --revision out for the one that "
            "verl-tim knows"
        ) from error
    except DamagedDownload as error:
        raise InputError(f"{where}: what arrived {error}; fetch it again") from error
    except (OSError, errors.HfHubHTTPError, httpx.HTTPError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise InputError(
            f"{where}: cannot be fetched from the Hugging Face hub ({why}), and is not on this machine. Run `verl-tim "
            f"data {source.name}` again where there is a network (it goes on where it stopped) and copy its folder, or "
            f"fetch {file.path} by other means and give it with --from {file.split}=FILE"
        ) from error
