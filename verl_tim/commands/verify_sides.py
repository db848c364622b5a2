"""`verl-tim verify --ladder` and `--layers`: the rungs in order, and two forwards op by op."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tim.commands.output import print_json, stderr, stdout, writing
from verl_tim.commands.places import refuse_foreign
from verl_tim.commands.quiet import quiet_libraries
from verl_tim.commands.verify import Target, climb_showing, planted, prompts_of, refused_engines, resolve

if TYPE_CHECKING:
    from verl_tim.commands.progress import Work
    from verl_tim.diagnosis.gate import LadderResult, Rung
    from verl_tim.verification.engine_dump import DumpedSequence
    from verl_tim.verification.layers import LayerReport
    from verl_tim.verification.subject import Subject

TRAINERS = ("contract", "stock")


@dataclass(frozen=True)
class Options:
    """The options of `verify` that both commands take; see `verify.command`."""

    subjects: list[str]
    rollout: str | None
    trainer: str
    dtypes: list[str] | None
    requests: int
    tokens: int
    seed: int
    dump: Path | None = None
    plant: str | None = None
    attention: str | None = None


# -------------------------------------------------------------------------------------------------------------- ladder


def climb_ladder(options: Options, as_json: bool) -> int:
    """Climb and print, once per subject and dtype; the exit code."""
    from verl_tim.commands.progress import Work
    from verl_tim.training.in_process import single_rank_group
    from verl_tim.verification.faults import RUNG_FAULTS

    reports: list[dict[str, Any]] = []
    code = 0
    with tempfile.TemporaryDirectory(prefix="verl-tim-ladder-") as work:
        with quiet_libraries():
            targets, others = _ladder_targets(options, Path(work))
        for target in targets:
            for dtype in target.dtypes:
                work_on = Work(f"{target.label}, {dtype}")
                planting = planted(options.plant, RUNG_FAULTS)
                with refused_engines(target.label), work_on, planting, quiet_libraries(), single_rank_group():
                    work_on.doing("loading")
                    rungs, other = _rungs(target, others, dtype, options)
                    result = climb_showing(rungs, work_on)
                code = max(code, result.exit_code)
                rollout = target.rollout if options.dump is None else f"file {options.dump}"
                reports.append({"subject": target.label, "dtype": dtype, "rollout": rollout, "other": other})
                reports[-1] |= result.to_dict()
                if not as_json:
                    beside = f" (other kind: {other})" if other else ""
                    _print_ladder(result, f"{target.label}{beside}, {dtype}, rollout={rollout}")
    if as_json:
        print_json({"passed": code == 0, "exit_code": code, "planted": options.plant, "subjects": reports})
    return code


def _print_ladder(result: LadderResult, title: str) -> None:
    stdout().print(result.table(title))
    stdout().print(result.summary() + "\n", soft_wrap=True)


def _ladder_targets(options: Options, work: Path) -> tuple[list[Target], dict[str, Target]]:
    """What to climb with, and the random model of each kind for the rungs that a subject cannot stand for."""
    # beside a subject they keep the contract of attention that serves any head size
    chosen = replace(options, attention=None) if options.subjects else options
    others = {target.label.removeprefix("random "): target for target in _resolved(chosen, [], work)}
    if options.subjects:
        return _resolved(options, options.subjects, work), others
    return [others["qwen3"]], others


def _resolved(options: Options, subjects: list[str], work: Path) -> list[Target]:
    from_file = options.dump is not None
    targets = resolve(
        subjects,
        rollout=options.rollout,
        dtypes=options.dtypes,
        attention=options.attention,
        work=work,
        from_file=from_file,
    )
    if options.dump is None or options.dtypes:
        return targets
    # what is in a file was computed once, so in one dtype; in another one the trainer would differ from anything
    return [replace(target, dtypes=target.dtypes[:1]) for target in targets]


def _rungs(target: Target, others: dict[str, Target], dtype: str, options: Options) -> tuple[list[Rung], str | None]:
    """The ladder of one subject, and the model that stands for the other kind (dense or MoE).

    From a file only its alignment can be told.
    """
    from verl_tim.models import load_model_config
    from verl_tim.verification.ladder import dumped_rung, six_rungs

    primary = _subject(target, dtype, options)
    is_moe = load_model_config(target.model_path).moe is not None
    if options.dump is not None:
        return [dumped_rung(primary, _dumped(options.dump, primary.vocab_size), moe=is_moe)], None
    # a run's rollout is not on the command line, and what stands for the other kind must have the same
    beside = replace(others["qwen3" if is_moe else "qwen3_moe"], rollout=target.rollout)
    other = _subject(beside, dtype, options)
    return six_rungs(primary, *((other, primary) if is_moe else (primary, other))), beside.label


def _subject(target: Target, dtype: str, options: Options) -> Subject:
    from verl_tim.verification.subject import Subject

    return Subject(
        target.model_path,
        dtype=dtype,
        attention=target.attention,
        rollout=target.rollout,
        trainer_numerics=options.trainer,
        requests=options.requests,
        response_tokens=options.tokens,
        seed=options.seed,
        prompts=prompts_of(target),
    )


def _dumped(path: Path, vocab_size: int) -> list[DumpedSequence]:
    from verl_tim.launch.errors import LaunchError
    from verl_tim.verification.engine_dump import DumpError, read_dump

    try:
        return read_dump(path, vocab_size=vocab_size)
    except DumpError as error:
        raise LaunchError.of(
            "--dump", str(error), "write it in the layout of verl_tim/verification/engine_dump.py"
        ) from error


# -------------------------------------------------------------------------------------------------------------- layers


def compare_layers(options: Options, out: Path, as_json: bool) -> int:
    """Lay both sides side by side, print and write; 1 if a pair that must agree does not."""
    from verl_tim.commands.progress import Work
    from verl_tim.diagnosis.own_file import mark
    from verl_tim.launch.errors import LaunchError
    from verl_tim.training.in_process import single_rank_group
    from verl_tim.verification.layers import LayersError

    if options.trainer not in TRAINERS:
        raise LaunchError.of("--trainer", f"{options.trainer!r} is unknown", f"choose from {', '.join(TRAINERS)}")
    if options.plant is not None:
        from verl_tim.verification.faults import FAULTS, RUNG_FAULTS

        fault = planted(options.plant, FAULTS | RUNG_FAULTS)
    else:
        fault = planted(None, {})
    if options.dump is not None and len(options.subjects) != 1:
        raise LaunchError.of("MODEL", "a dump is of one model", "give its folder (or its run) beside --dump")
    reports: list[dict[str, Any]] = []
    failed = False
    refuse_foreign(out / "layers.json", out / "layers.html")
    with writing():
        out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verl-tim-layers-") as work, fault:
        with quiet_libraries():
            targets = _resolved(options, options.subjects, Path(work))
        for target in targets:
            for dtype in target.dtypes:
                stem = "layers" if not reports else f"layers_{len(reports)}"
                refuse_foreign(out / f"{stem}.html")
                beside = Work(f"{target.label}, {dtype}: op by op")
                try:
                    with refused_engines(target.label), beside, quiet_libraries(), single_rank_group():
                        subject = _subject(target, dtype, options)
                        report = _layer_report(subject, options, beside)
                except LayersError as error:
                    raise LaunchError.of(
                        "--layers", str(error), "give both sides the same tokens of the same model"
                    ) from error
                failed |= subject.exact and options.dump is None and report.first is not None
                with writing():
                    report.page().write(out / f"{stem}.html")
                reports.append({"subject": target.label, "dtype": dtype, "page": f"{stem}.html", **report.to_dict()})
                if not as_json:
                    stdout().print(f"{target.label}, {dtype}")
                    stdout().print(report.table())
                    stdout().print(report.summary() + "\n", soft_wrap=True)
    content = {
        **mark("verify --layers"),
        "passed": not failed,
        "exit_code": int(failed),
        "planted": options.plant,
        "subjects": reports,
    }
    with writing():
        (out / "layers.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(content)
    stderr().print(f"pages and JSON: {out.absolute()}", soft_wrap=True)
    return int(failed)


def _layer_report(subject: Subject, options: Options, work: Work) -> LayerReport:
    from verl_tim.verification.forward import tokens_of, trainer_forward
    from verl_tim.verification.layers import LayerReport

    rollout = str(options.dump.name) if options.dump else subject.rollout
    report = LayerReport(f"{rollout} rollout", f"{subject.trainer_numerics} trainer")
    dumped = None if options.dump is None else _dumped(options.dump, subject.vocab_size)
    report.given = None if dumped is None else len(dumped)
    for sequence, temperature, taps in _rollout_sides(subject, options.requests, dumped):
        trainer = trainer_forward(subject.trainer, sequence, temperature)
        report.add(taps, trainer.taps, tokens=tokens_of(sequence))
        work.advance()
    return report


def _rollout_sides(
    subject: Subject, requests: int, dumped: Sequence[DumpedSequence] | None
) -> Iterator[tuple[Any, float, dict[str, Any]]]:
    """(tokens, temperature, taps) of so many sequences on the rollout's side."""
    from verl_tim.verification.forward import engine_forward
    from verl_tim.verification.subject import trainer_temperature

    if dumped is not None:
        for one in dumped[:requests]:
            yield one.tokens, one.temperature, one.taps
        return
    engine = subject.engine()
    drawn = subject.generate(engine, subject.draw_prompts(requests, tag="layers"))
    for prompt, output in drawn:
        sequence, temperature = prompt.answered(output), trainer_temperature(prompt)
        yield sequence, temperature, engine_forward(engine, sequence, temperature).taps
