"""`verl-tim plan`: does a run fit its GPUs, what will it hold in each phase, and how long will it take?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, print_text, stderr, stdout, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_tim.planning.gpu import Gpu
    from verl_tim.planning.plan import Memory, Plan
    from verl_tim.planning.remedy import Remedy
    from verl_tim.planning.step_time import StepTime

NAME = "plan"
HELP = (
    "Memory of each phase, time of a step and cost of a run, before anything is started.\n\n"
    "[dim]verl-tim plan cpu_grpo cluster=gpu1 model=hf actor_rollout_ref.model.path=Qwen/Qwen3-1.7B --gpu H100\n\n"
    "verl-tim plan my_run.yaml trainer.nnodes=8 --mean-response 6000\n\n"
    "verl-tim plan --anchors    [not dim]what the formulas predict beside what was measured[/]\n\n"
    "verl-tim plan --scaling    [not dim]the tables of docs/scaling.md[/][/]\n\n"
    "Exit code: 0 it fits, 1 it does not (with remedies that were planned), 2 the config cannot be planned."
)

_WIDE = 110  # columns of a terminal that has room for reasons


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE | FILE.yaml | RUN_FOLDER] [KEY=VALUE]...", help="A config, then overrides."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="The GPU: H200, H100, 'A100 80GB', 'A100 40GB', L40S, B200.")] = "H200",
    shape: Annotated[
        str | None, typer.Option(help="Model shape (qwen3-1.7b, ...) or folder, instead of the config's model.")
    ] = None,
    mean_prompt: Annotated[float | None, typer.Option(help="Mean prompt, tokens. Default: half the longest.")] = None,
    mean_response: Annotated[float | None, typer.Option(help="Mean answer, tokens. Default: half the longest.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the run, where the config does not say.")] = None,
    anchors: Annotated[bool, typer.Option("--anchors", help="Predictions beside measurements; no config.")] = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="Forecast for 8, 64, 512 GPUs; no config.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a run."""
    from verl_tim.launch.errors import LaunchError
    from verl_tim.planning.gpu import find_gpu

    with bad_input():
        if anchors and scaling:
            raise LaunchError.of("--anchors", "is given beside --scaling", "give one of the two")
        if (anchors or scaling) and words:
            raise LaunchError.of(words[0], "is given beside --anchors or --scaling", "leave it out")
        if not (anchors or scaling or words):
            raise LaunchError.of("RECIPE", "is not given", "name a recipe or a YAML: verl-tim plan cpu_grpo")
        chosen = find_gpu(gpu)
        if anchors:
            _anchors(as_json)
        elif scaling:
            from verl_tim.planning.scaling import forecasts, markdown

            rows = forecasts(chosen)
            print_json([row.to_mapping() for row in rows]) if as_json else print_text(markdown(rows) + "\n")
        else:
            _plan(words or [], chosen, shape, mean_prompt, mean_response, steps, as_json)


def _plan(
    words: Sequence[str], gpu: Gpu, shape: str | None, mean_prompt: float | None, mean_response: float | None,
    steps: int | None, as_json: bool,
) -> None:  # fmt: skip
    from omegaconf import OmegaConf

    from verl_tim.planning.plan import make_plan
    from verl_tim.planning.remedy import remedies
    from verl_tim.planning.shape import find_shape
    from verl_tim.planning.source import planned, steps_of

    source = planned(words)
    config = source.config
    model = find_shape(
        config.actor_rollout_ref.model.path, kind=OmegaConf.select(config, "tim.model.kind"), given=shape
    )
    plan = make_plan(
        config, model, gpu, mean_prompt=mean_prompt, mean_answer=mean_response, steps=steps or steps_of(config)
    )
    found = [] if plan.memory.fits else remedies(config, model, gpu)
    if as_json:
        means = [{"overrides": one.words, "cost": one.cost} for one in found]
        print_json({"source": source.name, **plan.to_mapping(), "remedies": means})
    else:
        _show(source.name, plan, found)
    if not plan.memory.fits:
        raise typer.Exit(1)


def _show(name: str, plan: Plan, found: Sequence[Remedy]) -> None:
    from verl_tim.units import count

    memory, s = plan.memory, plan.memory.settings
    gpus = f"{s.gpus} x {memory.gpu.name}"
    where = f"{gpus}, {s.replicas} replica{'s' * (s.replicas != 1)} of {s.replica_gpus}"
    if s.cpu:
        stderr().print("[yellow]trainer.device=cpu: planned as if each of its processes had a GPU[/]")
    _show_memory(f"{name}: {memory.shape.name}, {count(memory.shape.parameters)} parameters, {where}", memory)
    _show_pool(plan)
    if plan.step is not None:
        _show_step(plan.step)
        _show_run(plan, plan.step)
    if not memory.fits:
        _refuse(memory, found)


def _show_memory(title: str, memory: Memory) -> None:
    from verl_tim.units import size

    phases = memory.phases
    names = list(dict.fromkeys(item.name for phase in phases for item in phase.items if item.nbytes >= 1e6))
    wide = stdout().width >= _WIDE
    rows = []
    for name in names:
        sizes = [sum(item.nbytes for item in phase.items if item.name == name) for phase in phases]
        some = next(item for phase in phases for item in phase.items if item.name == name and item.nbytes >= 1e6)
        why = some.why + (" (assumed)" if some.assumed else "")
        rows.append((name, *(size(one) if one else "" for one in sizes), *([why] if wide else [])))
    colours = ["red" if phase.total > memory.gpu.memory else "green" for phase in phases]
    totals = [f"[bold {c}]{size(p.total)}[/]" for p, c in zip(phases, colours, strict=True)]
    rows.append(("[bold]in all[/]", *totals, *([""] if wide else [])))
    rows.append(("fullest at", *(phase.moment for phase in phases), *([""] if wide else [])))
    title += f"\nOn one GPU, of {size(memory.gpu.memory)} that PyTorch can see"
    table(title, ("", *(phase.name for phase in phases), *(["why so much"] if wide else [])), rows)
    if memory.host_bytes:
        stdout().print(f"On the host of each node: {size(memory.host_bytes)} of offloaded states.")


def _show_pool(plan: Plan) -> None:
    memory, s = plan.memory, plan.memory.settings
    rollout = memory.rollout
    mean = plan.prompts.mean + plan.answers.mean
    each = -(-s.sequences // s.replicas)
    rows = [
        ("KV pool of a replica", f"{rollout.pool_tokens:,} tokens"),
        ("sequences that a replica gets", f"{each:,}, at most {s.max_sequences} at once"),
        (f"that fit at the mean of {mean:,.0f} tokens", f"{int(rollout.pool_tokens / mean):,}"),
        (f"that fit at the longest of {s.longest:,} tokens", f"{int(rollout.pool_tokens / s.longest):,}"),
    ]
    if plan.step is not None:
        time = plan.step.rollout
        forecast = "none"
        if time.preemptions:
            forecast = f"{time.preemptions} sequences, {time.recomputed_tokens:,.0f} tokens computed again"
        rows.append(("most at once", f"{time.at_once} sequences, {time.most_context:,.0f} tokens"))
        rows.append(("preempted", forecast))
    means = "guessed: half of the longest" if plan.assumed_means else "given"
    rows.append(
        (
            "lengths (mean / longest)",
            f"prompt {plan.prompts.mean:,.0f} / {plan.prompts.longest:,}, answer {plan.answers.mean:,.0f} / "
            f"{plan.answers.longest:,}; means {means}; largest entropy under both",
        )
    )
    table("Rollout", ("", ""), rows)


def _show_step(step: StepTime) -> None:
    notes: dict[str, int] = {}
    rows = []
    for part in step.parts:
        numbers = []
        for reason in part.basis:
            if reason != "measured rate":
                numbers.append(str(notes.setdefault(reason, len(notes) + 1)))
        basis = "measured rate" if not numbers else "extrapolated " + ", ".join(numbers)
        rows.append((part.name, _figure(part.seconds), part.of, basis))
    last = "validation and checkpoints come on top"
    rows.append(("[bold]a step[/]", f"[bold]{_figure(step.seconds)}[/]", last, ""))
    table("A step, seconds", ("part", "s", "of", "rests on"), rows)
    for reason, number in notes.items():
        stdout().print(f"  {number}: {reason}", markup=False)


def _figure(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def _show_run(plan: Plan, step: StepTime) -> None:
    from verl_tim.units import count

    s = plan.memory.settings
    rows = [
        ("tokens per step (drawn)", f"{step.tokens:,.0f} ({step.drawn:,.0f})"),
        ("drawn tokens per second, over a step", f"{step.drawn / step.seconds:,.0f}"),
    ]
    if plan.steps is not None and plan.gpu_hours is not None:
        rows += [
            ("steps", f"{plan.steps:,}"),
            ("hours", _figure(step.seconds * plan.steps / 3600)),
            (f"GPU hours of {s.gpus} GPUs", _figure(plan.gpu_hours)),
            ("tokens of the run", count(step.tokens * plan.steps)),
        ]
    else:
        rows.append(("steps", "unknown: the data are not here; give --steps"))
    table("The run", ("", ""), rows)


def _refuse(memory: Memory, found: Sequence[Remedy]) -> None:
    from rich.text import Text

    console = stderr()
    for misfit in memory.misfits:
        console.print(Text.assemble((f"{misfit.phase}: ", "bold red"), misfit.problem), soft_wrap=True)
    if not found:
        console.print("  no change of these settings makes it fit: take larger GPUs, or a smaller model")
    for remedy in found:
        cost = (f"  (planned: fits; costs {remedy.cost})", "dim")
        console.print(Text.assemble(("  -> ", "bold"), " ".join(remedy.words), cost), soft_wrap=True)


def _anchors(as_json: bool) -> None:
    from verl_tim.planning.anchors import anchors

    rows = anchors()
    if as_json:
        print_json([{**vars(row), "ratio": row.ratio, "good": row.good} for row in rows])
    else:
        table(
            "Predicted beside measured (one NVIDIA H200)",
            ("what", "measured", "predicted", "predicted / measured", "kind"),
            [
                (
                    row.what,
                    f"{row.measured:,.4g} {row.unit}",
                    f"{row.predicted:,.4g} {row.unit}",
                    f"{row.ratio:.3f}",
                    "fitted" if row.fitted else "predicted",
                )
                for row in rows
            ],
        )
    if not all(row.good for row in rows):
        raise typer.Exit(1)
