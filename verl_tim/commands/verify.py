"""`verl-tim verify`: the exactness gate, rollout against trainer on tokens that the rollout really drew."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.model_folder import check_model, refuse_unreadable
from verl_tim.commands.output import bad_input, print_json, stdout
from verl_tim.commands.quiet import quiet_libraries

if TYPE_CHECKING:
    from verl_tim.commands.progress import Work
    from verl_tim.diagnosis.gate import LadderResult, Rung, ScenarioResult

Fault = Callable[[], contextlib.AbstractContextManager[None]]

NAME = "verify"
HELP = (
    "The exactness gate: rollout against trainer, bit by bit, under odd batches, chunks, preemption, prefix hits, "
    "temperatures and weight updates. Exit code 1 on the first differing bit, with its place and cause."
)

DTYPES = ("bfloat16", "float32")
ROLLOUTS = ("vexact", "stock")
PROMPTS_PER_FILE = 256

REQUESTS, LAYER_SEQUENCES = 24, 8

_OF_SIDES = frozenset({"rollout", "dtype", "attention", "requests", "tokens", "seed", "plant"})
OF_FILE = " --dump"
TAKES: Mapping[str, frozenset[str]] = {
    "--ops": frozenset({"attention"}),
    "--ladder": _OF_SIDES | {"dump"},
    f"--ladder{OF_FILE}": frozenset({"dtype", "attention", "dump"}),
    "--layers": _OF_SIDES | {"dump", "trainer", "out"},
    f"--layers{OF_FILE}": frozenset({"dtype", "attention", "dump", "requests", "trainer", "out"}),
    "the gate": _OF_SIDES | {"tensor_parallel", "pipeline_parallel"},
}
"""What is verified -> the parameters of `command` that it reads, beside what is verified and --json."""


@dataclass(frozen=True)
class Target:
    """One model to verify: a folder, a label, what the rollout of it is, and the attention contract of both sides."""

    label: str
    model_path: str
    rollout: str
    dtypes: tuple[str, ...]
    prompt_files: tuple[str, ...] = ()
    attention: str = "auto"


def command(
    context: typer.Context,
    subjects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|MODEL]...",
            help="Run folders or Hugging Face model folders; none: a random dense and a random MoE model.",
        ),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(help="vexact, or stock (sizes are reported, not judged); default: the run's, else vexact."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Compute dtype of both sides: bfloat16, float32; default: the run's, else all that the machine can."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=4,
            help=f"Requests per scenario; default {REQUESTS}. With --layers: sequences that are laid side by side, "
            f"drawn or of the dump; default {LAYER_SEQUENCES}.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=4, help="Most response tokens per request.")] = 32,
    seed: Annotated[int, typer.Option(help="Of prompts and draws.")] = 0,
    plant: Annotated[
        str | None,
        typer.Option(
            help="Plant an error that the gate must catch: one_ulp, stock_kernel, wrong_temperature, skipped_update; "
            "with --ladder one per rung: kept_generator, batch_dependent_kernel, stock_activation, "
            "rerouted_recomputation, sorted_experts, stale_kv."
        ),
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder",
            help="Six rungs instead of the gate: reproducible, batch-invariant, aligned, MoE training, MoE rollout, "
            "asynchronous; stops at the first that fails.",
        ),
    ] = False,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Lay the two sides' forwards side by side, op by op; page and JSON in --out."),
    ] = False,
    trainer: Annotated[
        str, typer.Option(help="With --layers: contract, or stock for verl's own forward.")
    ] = "contract",
    dump: Annotated[
        Path | None,
        typer.Option(
            help="With --ladder or --layers: another engine's tokens and log-probs (and hidden states) as .npz, "
            ".safetensors or .parquet, in place of a rollout; sizes are reported, not judged. --dtype: what it was "
            "computed in, if not bfloat16."
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="With --layers: folder for layers.html and layers.json; default: the current one. Those of an earlier "
            "call are replaced."
        ),
    ] = Path("."),
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Ranks that share each weight's outputs in the rollout; bits must not change.")
    ] = 1,
    pipeline_parallel: Annotated[
        int, typer.Option(min=1, help="Stages that share the rollout's layers; bits must not change.")
    ] = 1,
    ops: Annotated[
        bool,
        typer.Option(
            "--ops",
            help="Only compare every kernel schedule of this machine with the reference order, in bfloat16, at the "
            "shapes of the models.",
        ),
    ] = False,
    attention: Annotated[
        str | None,
        typer.Option(help="The attention contract: auto (chunk64), chunk64 or fa3; default: the run's, else auto."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
) -> None:
    """Verify."""
    split = (tensor_parallel, pipeline_parallel)
    with bad_input():
        if ops + ladder + layers > 1:
            raise _exclusive()
        mode = "--ops" if ops else "--ladder" if ladder else "--layers" if layers else "the gate"
        check_options(context, mode + OF_FILE if dump is not None and mode + OF_FILE in TAKES else mode)
        if split != (1, 1):
            check_split(plant=plant, rollout=rollout)
    requests = requests or (LAYER_SEQUENCES if layers else REQUESTS)
    if ops:
        _verify_ops(subjects or [], attention or "auto", as_json)
        return
    if ladder or layers:
        from verl_tim.commands import verify_sides

        options = verify_sides.Options(
            subjects or [], rollout, trainer, dtype, requests, tokens, seed, dump=dump, plant=plant, attention=attention
        )
        with bad_input():
            code = (
                verify_sides.climb_ladder(options, as_json)
                if ladder
                else verify_sides.compare_layers(options, out, as_json)
            )
        if code:
            raise typer.Exit(code)
        return
    with tempfile.TemporaryDirectory(prefix="verl-tim-verify-") as work, bad_input():
        targets = resolve(subjects or [], rollout=rollout, dtypes=dtype, attention=attention, work=Path(work))
        from verl_tim.verification.faults import FAULTS

        fault = planted(plant, FAULTS)
        reports: list[dict[str, Any]] = []
        code = 0
        with fault:
            for target in targets:
                for name in target.dtypes:
                    result, facts = climb_target(target, name, requests=requests, tokens=tokens, seed=seed, split=split)
                    reports.append(
                        {"subject": target.label, "dtype": name, "rollout": target.rollout, **facts, **result.to_dict()}
                    )
                    code = max(code, result.exit_code)
                    if not as_json:
                        stdout().print(result.table(_title(target, name, split)))
                        stdout().print(result.summary() + "\n", soft_wrap=True)
    if as_json:
        print_json({"passed": code == 0, "exit_code": code, "planted": plant, "subjects": reports})
    if code:
        raise typer.Exit(code)


def _title(target: Target, dtype: str, split: tuple[int, int]) -> str:
    title = f"{target.label}, {dtype}, rollout={target.rollout}"
    return title if split == (1, 1) else f"{title} on {split[0]} x {split[1]} ranks"


def check_split(*, plant: str | None, rollout: str | None) -> None:
    """Raise LaunchError for what does not go with an engine on several ranks."""
    from verl_tim.launch.errors import LaunchError

    key = "--tensor-parallel, --pipeline-parallel"
    if plant is not None:
        raise LaunchError.of(key, f"--plant {plant} plants in one process", "plant in a gate on one rank")
    if rollout == "stock":
        raise LaunchError.of(key, "rollout stock runs on one rank", "give --rollout vexact")


def _exclusive() -> Exception:
    from verl_tim.launch.errors import LaunchError

    return LaunchError.of("--ops, --ladder, --layers", "are commands of their own", "give one of them")


def check_options(context: typer.Context, mode: str) -> None:
    """Raise LaunchError for options that were given and that `mode`, a key of `TAKES`, would not read."""
    from verl_tim.launch.errors import LaunchError

    for name in sorted(frozenset().union(*TAKES.values()) - TAKES[mode]):
        source = context.get_parameter_source(name)
        # by name: Typer may bring a Click of its own, whose enumeration is another
        if source is not None and source.name == "COMMANDLINE":
            takers = " or ".join(other for other, names in TAKES.items() if name in names and OF_FILE not in other)
            key = "--" + name.replace("_", "-")
            raise LaunchError.of(key, f"goes with {takers}, not with {mode}", f"leave it out, or run {takers}")


def _verify_ops(subjects: list[str], attention: str, as_json: bool) -> None:
    from verl_tim.commands.progress import Work
    from verl_tim.commands.verify_ops import print_report
    from verl_tim.launch.errors import LaunchError
    from verl_tim.numerics.attention import ATTENTION_NAMES
    from verl_tim.verification.ops import OpsError, probe_models

    with bad_input():
        if attention not in ATTENTION_NAMES:
            raise LaunchError.of(
                "--attention", f"{attention!r} is unknown", f"choose from {', '.join(ATTENTION_NAMES)}"
            )
    with bad_input(), Work("every kernel schedule against the reference") as work, quiet_libraries():
        try:
            reports = probe_models(
                subjects,
                attention,
                lambda report: work.ended(f"{report['subject']}: {'holds' if report['problem'] is None else 'FAILS'}"),
            )
        except OpsError as error:
            raise LaunchError.of(
                "MODEL", str(error), "give the folder of a Hugging Face model that the contract covers"
            ) from error
    passed = all(report["problem"] is None for report in reports)
    if as_json:
        print_json({"passed": passed, "models": reports})
    else:
        for report in reports:
            print_report(report)
    if not passed:
        raise typer.Exit(1)


def resolve(
    subjects: list[str],
    *,
    rollout: str | None,
    dtypes: list[str] | None,
    work: Path,
    attention: str | None = None,
    from_file: bool = False,
) -> list[Target]:
    """What to verify.

    Args:
        attention: in place of a run's own attention contract.
        from_file: a dump stands for the rollout, so that a run's own may be one that cannot be started here.

    Raises LaunchError for a subject that is neither a run nor a model, for unknown option values, and for an attention
    contract that cannot serve a subject on this machine.
    """
    from verl_tim.launch.errors import LaunchError

    for key, values, known in (
        ("--rollout", [rollout] if rollout else [], ROLLOUTS),
        ("--dtype", dtypes or [], DTYPES),
    ):
        for value in values:
            if value not in known:
                raise LaunchError.of(key, f"{value!r} is unknown", f"choose from {', '.join(known)}{_dumped(value)}")
    chosen = tuple(dtypes) if dtypes else None
    if not subjects:
        from verl_tim.verification.random_models import KINDS, make_random_model

        with quiet_libraries():
            folders = {kind: str(make_random_model(kind, work / kind)) for kind in KINDS}
        targets = [
            Target(f"random {kind}", folder, rollout or "vexact", chosen or default_dtypes())
            for kind, folder in folders.items()
        ]
    else:
        targets = [_subject(subject, rollout, chosen, from_file) for subject in subjects]
    if attention is not None:
        targets = [replace(target, attention=attention) for target in targets]
    for target in targets:
        _check_attention(target)
    return targets


def _check_attention(target: Target) -> None:
    """Raise LaunchError for an attention contract that is unknown, or that this machine cannot serve."""
    import torch

    from verl_tim.launch.errors import LaunchError
    from verl_tim.models import load_model_config
    from verl_tim.numerics.attention import resolve_attention
    from verl_tim.numerics.contract import ContractError

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolve_attention(target.attention, device, load_model_config(target.model_path).head_dim)
    except ContractError as error:
        raise LaunchError.of("--attention", f"{target.label}: {error}", "give --attention chunk64") from error


def default_dtypes() -> tuple[str, ...]:
    """The dtypes that the contract covers on this machine."""
    import torch

    return ("bfloat16",) if torch.cuda.is_available() else DTYPES


def _dumped(rollout: str) -> str:
    """How a rollout that verify does not start is verified all the same."""
    if rollout != "vllm":
        return ""
    return (
        ", or verl-tim probe MODEL --data FILE --rollout vllm --dump FILE --hidden 8, and verify --layers --dump FILE"
    )


def _subject(subject: str, rollout: str | None, dtypes: tuple[str, ...] | None, from_file: bool) -> Target:
    from verl_tim.launch.errors import LaunchError

    folder = Path(subject)
    if (folder / "config.yaml").is_file():
        return _run_target(folder, rollout, dtypes, from_file)
    if (folder / "config.json").is_file():
        check_model(folder)
        return Target(str(folder), str(folder), rollout or "vexact", dtypes or default_dtypes())
    raise LaunchError.of(
        "RUN|MODEL",
        f"{subject} is neither a run folder (config.yaml) nor a model folder (config.json)",
        "give one of the two, or nothing",
    )


def _run_target(folder: Path, rollout: str | None, dtypes: tuple[str, ...] | None, from_file: bool) -> Target:
    from omegaconf import OmegaConf

    from verl_tim.diagnosis.run_folder import RunFolder, RunFolderError
    from verl_tim.launch.errors import LaunchError
    from verl_tim.training.config import ATTENTION_KEY

    try:
        config = OmegaConf.create(RunFolder(folder).config() or {})
    except RunFolderError as error:
        raise LaunchError.of_input(error, "RUN|MODEL", "give the run's model folder instead") from error
    name = rollout or str(OmegaConf.select(config, "actor_rollout_ref.rollout.name"))
    if name not in ROLLOUTS and not from_file:
        raise LaunchError.of(
            "actor_rollout_ref.rollout.name",
            f"{folder} ran rollout={name}, which verify cannot start",
            f"give --rollout vexact or stock{_dumped(name)}",
        )
    path = OmegaConf.select(config, "actor_rollout_ref.model.path")
    if path is None or not Path(path).is_dir():
        raise LaunchError.of(
            "actor_rollout_ref.model.path",
            f"{folder}: the run's model {path} is not on this machine",
            "give its folder instead of the run",
        )
    check_model(Path(path))
    run_dtype = str(OmegaConf.select(config, "actor_rollout_ref.rollout.dtype") or "bfloat16")
    files = OmegaConf.select(config, "data.train_files") or []
    files = [files] if isinstance(files, str) else list(files)
    # of a dump nothing is started, but the trainer's side is made beside a rollout of some name
    name = name if name in ROLLOUTS else "vexact"
    attention = str(OmegaConf.select(config, ATTENTION_KEY) or "auto")
    return Target(str(folder), str(path), name, dtypes or (run_dtype,), tuple(str(file) for file in files), attention)


def planted(name: str | None, known: Mapping[str, Fault]) -> contextlib.AbstractContextManager[None]:
    """The planted fault of that name, or nothing; LaunchError for an unknown one."""
    from verl_tim.launch.errors import LaunchError

    if name is None:
        return contextlib.nullcontext()
    if name not in known:
        raise LaunchError.of("--plant", f"{name!r} is unknown", f"choose from {', '.join(known)}")
    return known[name]()


@contextlib.contextmanager
def refused_engines(label: str, split: tuple[int, int] = (1, 1)) -> Iterator[None]:
    """What an engine refuses of a subject, as LaunchError."""
    from verl_tim.engine import EngineConfigError
    from verl_tim.launch.errors import LaunchError

    try:
        yield
    except EngineConfigError as error:
        key, remedy = "MODEL", "choose another model, or make room for this one"
        if split != (1, 1):
            key, remedy = "--tensor-parallel, --pipeline-parallel", "choose other degrees, or another model"
        raise LaunchError.of(key, f"{label}: {error}", remedy) from error


def climb_target(
    target: Target, dtype: str, *, requests: int, tokens: int, seed: int, split: tuple[int, int] = (1, 1)
) -> tuple[LadderResult, dict[str, Any]]:
    """All scenarios for one model and dtype; the ladder's result, and what was measured beside it."""
    from verl_tim.commands.progress import Work
    from verl_tim.training.in_process import single_rank_group
    from verl_tim.verification.scenarios import ladder
    from verl_tim.verification.subject import Subject

    began = time.perf_counter()
    with Work(f"{target.label}, {dtype}") as work, quiet_libraries(), single_rank_group():
        work.doing("loading")
        with refused_engines(target.label, split):
            subject = Subject(
                target.model_path,
                dtype=dtype,
                attention=target.attention,
                rollout=target.rollout,
                requests=requests,
                response_tokens=tokens,
                seed=seed,
                prompts=prompts_of(target),
                tensor_parallel=split[0],
                pipeline_parallel=split[1],
            )
        with contextlib.closing(subject), refused_engines(target.label, split):
            spread = subject.spread()  # of the model as it is given: the last rung trains it
            if note := flatness(spread):
                work.ended(f"{target.label}: {note}")
            result = climb_showing(ladder(subject), work)
            facts = {"model_path": target.model_path, **spread}
    facts |= {"tensor_parallel": split[0], "pipeline_parallel": split[1]}
    return result, {**facts, "seconds": round(time.perf_counter() - began, 1)}


def flatness(spread: dict[str, float]) -> str | None:
    """What to say of a model whose distributions are flatter than a trained model's; None of the others."""
    top = spread["mean_top_probability"]
    if top >= 0.3:
        return None
    return (
        f"its distributions are flat (mean top probability {top:g}), where logits may differ and log-probs hardly do: "
        "equal bits show less than those of a trained model, or of one from verl-tim model --random"
    )


def climb_showing(rungs: Sequence[Rung], work: Work) -> LadderResult:
    """Climb, and show each scenario as it begins and as it ends."""
    from verl_tim.diagnosis.gate import climb

    def begun(rung: str, name: str) -> None:
        work.begun("scenario", f"{rung}, {name}")

    def shown(rung: str, result: ScenarioResult) -> None:
        answer = "FAILED" if not result.passed else "passed" if result.exact else "measured"
        # of a run that is stopped before its table, these lines are what is known
        compared = "" if result.report is None else f"{result.report.tokens:,} {result.what}, "
        work.ended(f"{rung}, {result.name}: {answer}, {compared}{result.seconds:.1f} s")
        work.advance()

    work.of(sum(len(rung.scenarios) for rung in rungs))
    return climb(rungs, on_result=shown, on_begin=begun)


def prompts_of(target: Target) -> list[Any] | None:
    """Token ids of the run's own prompts, by its tokenizer and chat template; None where the target is not a run."""
    if not target.prompt_files:
        return None
    from transformers import AutoTokenizer

    from verl_tim.launch.errors import LaunchError
    from verl_tim.verification.prompts import PromptError, read_prompts

    refuse_unreadable(target.model_path, "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(target.model_path)
    try:
        return list(read_prompts(target.prompt_files, tokenizer, limit=PROMPTS_PER_FILE))
    except PromptError as error:
        raise LaunchError.of("data.train_files", str(error), "give the model's folder instead of the run") from error
