"""What one node says of itself: versions, GPUs, memory, disks, files. Starts no CUDA context."""

from __future__ import annotations

import csv
import hashlib
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_tim.diagnosis.process import DETERMINISM_VARIABLES, package_versions, processor

# Beyond the packages of a run's manifest: what verl talks through, and what a GPU run computes with.
PACKAGES = ("numpy", "TransferQueue", "nvidia-nccl-cu12", "nvidia-nccl-cu13")

# nvidia-smi hangs on a GPU that has fallen off its bus.
_SMI_SECONDS = 20
# Bytes of each end of a file that its stamp holds; the whole of a data file would take minutes.
_ENDS = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU: its memory in bytes, and the processes that compute on it, as far as this container sees them."""

    name: str
    total: int
    free: int
    users: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeFacts:
    """One node.

    Attributes:
        versions: distribution -> version, without those that are not installed; python.
        source: of verl_tim's Python files, so that two checkouts of one version differ.
        driver: of the GPUs; None without one.
        shm: total and free bytes of /dev/shm; None where there is none.
        disk: name of a place -> free bytes where it is or would be made, or why that cannot be told.
        files: key of the config -> what is there, as text that is equal for equal files; None: nothing.
        variables: those that decide the order of a sum, as a worker sees them.
    """

    host: str
    versions: Mapping[str, str]
    source: str = ""
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str | None = None
    processor: str = ""
    shm: tuple[int, int] | None = None
    disk: Mapping[str, int | str] = field(default_factory=dict)
    files: Mapping[str, str | None] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def collect(places: Mapping[str, str], files: Mapping[str, str]) -> NodeFacts:
    """The facts of this machine, in this process's environment.

    Args:
        places: name -> folder whose free space counts; it need not exist.
        files: key -> file or folder that the run will read.
    """
    gpus, driver, error = gpus_here()
    return NodeFacts(
        host=socket.gethostname(),
        versions={**package_versions(), **package_versions(PACKAGES)},
        source=source_hash(),
        driver=driver,
        gpus=gpus,
        gpu_error=error,
        processor=processor(),
        shm=_shm(),
        disk={name: free_disk(Path(folder)) for name, folder in places.items()},
        files={key: stamp(Path(path)) for key, path in files.items()},
        variables={name: os.environ[name] for name in DETERMINISM_VARIABLES if name in os.environ},
    )


def source_hash() -> str:
    """SHA-256 over the names and contents of verl_tim's Python files, its first 12 digits."""
    import verl_tim

    root = Path(verl_tim.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def gpus_here() -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """GPUs, driver, and why they cannot be told (None: they were told, or there is no NVIDIA driver here).

    By nvidia-smi, since Ray hides the GPUs from a process that asked for none.
    """
    if shutil.which("nvidia-smi") is None:
        return (), None, None
    try:
        gpus = _smi("--query-gpu=uuid,name,memory.total,memory.free,driver_version")
        users = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory")
    except (OSError, subprocess.SubprocessError) as error:
        return (), None, str(error)
    return _parse(gpus, users), (gpus[0][4] if gpus else None), None


def _smi(query: str) -> list[list[str]]:
    answer = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=_SMI_SECONDS,
        check=True,
    )
    return list(csv.reader(answer.stdout.splitlines(), skipinitialspace=True))


def _parse(gpus: list[list[str]], users: list[list[str]]) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            name,
            _mebibytes(total),
            _mebibytes(free),
            tuple(f"{process} (pid {pid}, {memory} MiB)" for one, pid, process, memory in users if one == uuid),
        )
        for uuid, name, total, free, _ in gpus
    )


def _mebibytes(text: str) -> int:
    # "[N/A]" where memory is shared with the host
    return int(text) << 20 if text.strip().isdigit() else 0


def _shm() -> tuple[int, int] | None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free


def free_disk(folder: Path) -> int | str:
    """Free bytes where a folder is or would be made; text where it could not be made, or not be written."""
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not there.is_dir():
            return f"{there} is a file"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"{there} cannot be written to"
        return shutil.disk_usage(there).free
    except OSError as error:
        return str(error)


def stamp(path: Path) -> str | None:
    """What a file or a folder of a model holds, told by sizes, the ends of a file and small text files; None: nothing
    is there, or it cannot be read."""
    digest = hashlib.sha256()
    try:
        if path.is_file():
            size = path.stat().st_size
            with path.open("rb") as stream:
                digest.update(stream.read(_ENDS))
                stream.seek(max(size - _ENDS, 0))
                digest.update(stream.read())
            return f"{size:,} bytes, {digest.hexdigest()[:12]}"
        if not path.is_dir():
            return None
        files = sorted(one for one in path.iterdir() if one.is_file())
        for one in files:
            digest.update(f"{one.name}\0{one.stat().st_size}\0".encode())
            if one.suffix == ".json" and one.stat().st_size < _ENDS:
                digest.update(one.read_bytes())
        total = sum(one.stat().st_size for one in files)
        return f"{len(files)} files, {total:,} bytes, {digest.hexdigest()[:12]}"
    except OSError:
        return None
