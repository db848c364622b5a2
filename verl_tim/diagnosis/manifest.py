"""`manifest.json`: what actually ran, read from the running processes, not from the config; and the diff of several."""

from __future__ import annotations

import dataclasses
import json
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from verl_tim.diagnosis.errors import DiagnosisError

FORMAT = 1
MANIFEST_NAME = "manifest.json"
OldLogProbs = Literal["recompute", "bypass", "reuse"]


class ManifestError(DiagnosisError):
    """A manifest, or a fact reported for one, that cannot be used; the message names the key."""


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """What one trainer worker or rollout server reports of itself (its `describe()`), on CPU or GPU.

    None means: does not apply here, or the backend does not tell. Dtypes are names without the `torch.` prefix.
    """

    backend: str  # "fsdp2", "vexact", "stock", "vllm", ...
    backend_version: str
    numerics: str | None = None  # "contract", "stock", or what the backend calls it
    contract_id: str | None = None
    # Where it ran.
    device_type: str | None = None
    device: str | None = None  # name of the GPU or the CPU
    driver: str | None = None
    threads: int | None = None
    # Number formats.
    param_dtype: str | None = None
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    head_dtype: str | None = None
    kv_dtype: str | None = None
    # Kernels.
    attention_backend: str | None = None
    attention_version: str | None = None
    kv_split: str | int | None = None
    kv_chunk: int | None = None
    page_size: int | None = None
    gemm_kernel: str | None = None
    gemm_batch_invariant: bool | None = None
    moe_kernel: str | None = None
    moe_batch_invariant: bool | None = None
    norm_kernel: str | None = None
    norm_batch_invariant: bool | None = None
    graph_buckets: list[int] | None = None
    # Layout.
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    sequence_parallel: int | None = None
    expert_parallel: int | None = None
    data_parallel: int | None = None
    # Sampling.
    prefix_cache: bool | None = None
    sampling_backend: str | None = None
    log_prob_mode: str | None = None
    # Determinism.
    nccl_algo: str | None = None
    determinism: dict[str, str] = field(default_factory=dict)  # environment variables as this process sees them
    torch_flags: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    # The model as this process holds it: architecture, parameters, num_layers, vocab_size, ...
    model: dict[str, Any] = field(default_factory=dict)
    # Whatever else the process reports; kept and compared like the rest.
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_describe(cls, facts: Mapping[str, Any], *, process: str = "process") -> ProcessFacts:
        """Facts from a `describe()` dict. Unknown keys go to `extra`; values are made plain JSON (dtypes and devices by
        name).

        Raises:
            ManifestError: a required key is missing, or a value is of the wrong type, or cannot be stored as JSON.
        """
        known: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in facts.items():
            plain = _plain(value, f"{process}: {key}")
            if key == "extra":
                if not isinstance(plain, dict):
                    raise ManifestError(f"{process}: extra must be a mapping, got {plain!r}")
                extra.update(plain)
            elif key in FACT_TYPES:
                if not _fits(plain, FACT_TYPES[key]):
                    expected = getattr(FACT_TYPES[key], "__name__", str(FACT_TYPES[key]))
                    raise ManifestError(f"{process}: {key} must be {expected}, got {plain!r}")
                known[key] = plain
            else:
                extra[key] = plain
        missing = [f.name for f in fields(cls) if _required(f) and f.name not in known]
        if missing:
            raise ManifestError(f"{process}: describe() lacks {', '.join(missing)}")
        return cls(**known, extra=extra)


FACT_TYPES: dict[str, Any] = get_type_hints(ProcessFacts)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process ran. Never compared between runs.

    Attributes:
        node: Ray's id of the node; nodes may share an address.
        ip: the node's address.
        host: the node's name for itself.
        pid: of the process.
    """

    node: str
    ip: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"node {self.ip} ({self.host}, {self.node[:8]}), pid {self.pid}"


@dataclass(frozen=True)
class Side:
    """All processes of one side. `facts` are common to all of them; what a process reports differently stands under its
    name.

    Attributes:
        processes: names in the order given ("actor 0", "server 1", ...), at least one.
        facts: facts of the first process.
        different: process name -> {dotted key: its value} where it disagrees with `facts`.
        places: process name -> where it ran; empty where nobody asked.
    """

    processes: list[str]
    facts: ProcessFacts
    different: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        """Ray's ids of the nodes that hold these processes, in the order of the processes."""
        return list(dict.fromkeys(place.node for place in self.places.values()))

    @classmethod
    def merge(
        cls,
        described: Mapping[str, Mapping[str, Any] | ProcessFacts],
        side: str,
        places: Mapping[str, Place] | None = None,
    ) -> Side:
        """Merge the `describe()` dicts of one side's processes.

        Raises:
            ManifestError: no process, or one whose facts do not fit.
        """
        if not described:
            raise ManifestError(f"no {side} process was described: the manifest is read from running processes")
        everyone = {
            name: facts if isinstance(facts, ProcessFacts) else ProcessFacts.from_describe(facts, process=name)
            for name, facts in described.items()
        }
        first = next(iter(everyone.values()))
        base = flatten(dataclasses.asdict(first))
        different = {}
        for name, facts in everyone.items():
            flat = flatten(dataclasses.asdict(facts))
            own = {key: flat.get(key) for key in sorted(flat.keys() | base.keys()) if flat.get(key) != base.get(key)}
            if own:
                different[name] = own
        return cls(list(everyone), first, different, dict(places or {}))


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the run as a whole was. `rollout` and `correction` are the names used in tables and on pages."""

    name: str
    rollout: str
    correction: str
    trainer_numerics: str | None = None
    recipe: str | None = None
    task: str | None = None
    algorithm: str | None = None  # advantage estimator
    seed: int | None = None
    started: str | None = None  # ISO 8601, with offset
    attempt: int = 1  # 2 and more: starts again in a folder that holds the run so far
    resumed_from: int | None = None  # step of the checkpoint that this attempt goes on from


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that decides what a run's log-probs are made of.

    Attributes:
        run: names.
        trainer, rollout: the processes of each side.
        old_log_probs: "recompute" (the trainer scores the batch again), "bypass" (the rollout's are in PPO's ratio), or
            "reuse" (the rollout's stand for the trainer's, to which they are equal).
        correction: every key of the resolved correction with its threshold.
        routing_replay: the mode in use, or None.
        deterministic: with `tim.deterministic`, what each process answered when asked (`processes`); empty otherwise.
    """

    run: RunFacts
    trainer: Side
    rollout: Side
    old_log_probs: OldLogProbs
    correction: dict[str, Any] = field(default_factory=dict)
    routing_replay: str | None = None
    deterministic: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def from_processes(
        cls,
        *,
        run: RunFacts | Mapping[str, Any],
        trainer: Mapping[str, Mapping[str, Any] | ProcessFacts],
        rollout: Mapping[str, Mapping[str, Any] | ProcessFacts],
        old_log_probs: OldLogProbs,
        correction: Mapping[str, Any] | None = None,
        routing_replay: str | None = None,
        deterministic: Mapping[str, Any] | None = None,
        places: Mapping[str, Place] | None = None,
    ) -> Manifest:
        """Build a manifest from the `describe()` dicts of running processes, by process name.

        Args:
            places: of processes of both sides, by their names.

        Raises:
            ManifestError: a side without processes, a missing or ill-typed fact, an unknown key of `run`.
        """
        if old_log_probs not in get_args(OldLogProbs):
            known = ", ".join(map(repr, get_args(OldLogProbs)))
            raise ManifestError(f"old_log_probs must be one of {known}, got {old_log_probs!r}")
        return cls(
            run=run if isinstance(run, RunFacts) else _build(RunFacts, dict(run), "run"),
            trainer=Side.merge(trainer, "trainer", _of(trainer, places)),
            rollout=Side.merge(rollout, "rollout", _of(rollout, places)),
            old_log_probs=old_log_probs,
            correction=_plain(dict(correction or {}), "correction"),
            routing_replay=routing_replay,
            deterministic=_plain(dict(deterministic or {}), "deterministic"),
        )

    @property
    def parameters(self) -> int | None:
        """Size of the model in parameters, as a process reports it."""
        for side in (self.trainer, self.rollout):
            count = side.facts.model.get("parameters")
            if isinstance(count, int):
                return count
        return None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def write(self, path: str | Path) -> Path:
        """Write as JSON, whole or not at all. `path` is the file, or the run folder that gets `manifest.json`."""
        path = Path(path)
        if path.is_dir():
            path = path / MANIFEST_NAME
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        scratch.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(scratch, path)
        return path

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read a manifest file, or the one in a run folder.

        Raises:
            FileNotFoundError: there is none.
            ManifestError: not a manifest of this format; the message names file and key.
        """
        path = Path(path)
        if path.is_dir():
            path = path / MANIFEST_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ManifestError(f"{path} is not JSON: {error}") from error
        try:
            return cls.of_dict(content)
        except ManifestError as error:
            raise ManifestError(f"{path}: {error}") from error

    @classmethod
    def of_dict(cls, content: Any) -> Manifest:
        """What `to_dict` gave.

        Raises:
            ManifestError: not a manifest of this format; the message names the key.
        """
        if not isinstance(content, Mapping):
            raise ManifestError(f"no manifest: expected an object, got {type(content).__name__}")
        if content.get("format") != FORMAT:
            raise ManifestError(f"format {content.get('format')!r} is not known here (expected {FORMAT})")
        try:
            return cls(
                run=_build(RunFacts, content.get("run"), "run"),
                trainer=_read_side(content.get("trainer"), "trainer"),
                rollout=_read_side(content.get("rollout"), "rollout"),
                old_log_probs=content["old_log_probs"],
                correction=dict(content.get("correction") or {}),
                routing_replay=content.get("routing_replay"),
                deterministic=dict(content.get("deterministic") or {}),
            )
        except KeyError as error:
            raise ManifestError(f"key {error.args[0]!r} is missing") from error


@dataclass(frozen=True)
class Difference:
    """One key whose values differ between runs. `values`: run -> value, None where a run does not have it."""

    key: str
    values: dict[str, Any]
    of_rollout: bool = False


# Facts of the rollout side that *are* the rollout: which engine it is and with which kernels it computes. Its number
# formats, layout and sampling are not in this list, since a pair that compares rollouts keeps them equal.
ROLLOUT_IDENTITY = frozenset(
    {
        "backend",
        "backend_version",
        "numerics",
        "contract_id",
        "reduce_dtype",
        "head_dtype",
        "attention_backend",
        "attention_version",
        "kv_split",
        "kv_chunk",
        "page_size",
        "gemm_kernel",
        "gemm_batch_invariant",
        "moe_kernel",
        "moe_batch_invariant",
        "norm_kernel",
        "norm_batch_invariant",
        "graph_buckets",
        "prefix_cache",
        "sampling_backend",
        "log_prob_mode",
        "extra",
    }
)
ROLLOUT_IDENTITY_ENVIRONMENT = ("VLLM_",)
# Different in every run and of no consequence for its numbers.
INCIDENTAL = frozenset({"run.name", "run.started", "run.attempt", "run.resumed_from", "format"})


def diff(manifests: Mapping[str, Manifest], *, include_rollout: bool = False) -> list[Difference]:
    """Every difference between runs besides the rollout, in key order.

    Args:
        manifests: by the name the differences are reported under.
        include_rollout: add the differences that the change of rollout consists of, marked `of_rollout`.
    """
    flats = {name: _comparable(manifest) for name, manifest in manifests.items()}
    differences = differing_keys(flats)
    others = len({m.rollout.facts.backend for m in manifests.values()}) > 1
    marked = [
        dataclasses.replace(d, of_rollout=_is_rollout(d.key) or (others and _is_unsaid(d)))
        for d in differences
        if d.key not in INCIDENTAL
    ]
    return [d for d in marked if include_rollout or not d.of_rollout]


def differing_keys(flats: Mapping[str, Mapping[str, Any]]) -> list[Difference]:
    """Keys of flat mappings whose values are not the same in all of them, sorted."""
    found = []
    for key in sorted(set().union(*(flat.keys() for flat in flats.values()))):
        values = {name: flat.get(key) for name, flat in flats.items()}
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) > 1:
            found.append(Difference(key, values))
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; lists stay values; empty mappings vanish."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _comparable(manifest: Manifest) -> dict[str, Any]:
    tree = manifest.to_dict()
    # what each process answered is for `same`; here whether it was asked
    tree["deterministic"] = bool(tree["deterministic"])
    for name in ("trainer", "rollout"):
        side = tree.pop(name)
        tree[name] = side["facts"] | {"processes": len(side["processes"]), "disagreements": side["different"]}
    return flatten(tree)


def _is_rollout(key: str) -> bool:
    if key == "run.rollout":
        return True
    side, _, rest = key.partition(".")
    if side != "rollout":
        return False
    if rest.partition(".")[0] in ROLLOUT_IDENTITY:
        return True
    return rest.startswith(tuple(f"determinism.{name}" for name in ROLLOUT_IDENTITY_ENVIRONMENT))


def _is_unsaid(difference: Difference) -> bool:
    """Whether a rollout does not report what another one does, as vLLM its KV cache's dtype: nothing that was set."""
    return difference.key.startswith("rollout.") and None in difference.values.values()


def _of(described: Mapping[str, Any], places: Mapping[str, Place] | None) -> dict[str, Place]:
    return {name: place for name, place in (places or {}).items() if name in described}


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _build(cls: type, content: Any, where: str) -> Any:
    """A dataclass from a mapping: unknown, missing and ill-typed keys are errors."""
    if not isinstance(content, Mapping):
        raise ManifestError(f"{where} must be an object, got {content!r}")
    hints = get_type_hints(cls)
    names = {f.name for f in fields(cls)}
    unknown = sorted(content.keys() - names)
    if unknown:
        raise ManifestError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(names))}")
    missing = [f.name for f in fields(cls) if _required(f) and f.name not in content]
    if missing:
        raise ManifestError(f"{where}: key {missing[0]!r} is missing")
    for key, value in content.items():
        if not _fits(value, hints[key]):
            raise ManifestError(f"{where}.{key}: {value!r} is not of type {hints[key]}")
    return cls(**content)


def _read_side(content: Any, where: str) -> Side:
    if not isinstance(content, Mapping):
        raise ManifestError(f"{where} must be an object, got {content!r}")
    for key in ("processes", "facts"):
        if not content.get(key):
            raise ManifestError(f"{where}: key {key!r} is missing or empty")
    return Side(
        processes=list(content["processes"]),
        facts=_build(ProcessFacts, content["facts"], f"{where}.facts"),
        different={name: dict(own) for name, own in (content.get("different") or {}).items()},
        places={
            name: _build(Place, place, f"{where}.places.{name}")
            for name, place in (content.get("places") or {}).items()
        },
    )


def _fits(value: Any, hint: Any) -> bool:
    """Is a plain JSON value of the annotated type? bool does not pass for int."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        (item,) = get_args(hint)
        return isinstance(value, list) and all(_fits(entry, item) for entry in value)
    if origin is dict:
        _, item = get_args(hint)
        return isinstance(value, dict) and all(isinstance(k, str) and _fits(v, item) for k, v in value.items())
    if hint is type(None):
        return value is None
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _plain(value: Any, where: str) -> Any:
    """A JSON value: mappings, sequences, paths, torch dtypes and devices become what JSON can hold."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(entry, where) for entry in value), key=str)
    if isinstance(value, Sequence) or (isinstance(value, Iterable) and hasattr(value, "__len__")):
        return [_plain(entry, where) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    name = type(value).__module__.partition(".")[0]
    if name == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    raise ManifestError(f"{where}: {type(value).__name__} cannot be stored in a manifest")
