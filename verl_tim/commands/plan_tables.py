"""A plan in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_tim.commands.output import stderr, stdout, table

if TYPE_CHECKING:
    from verl_tim.planning.host_plan import HostPlan
    from verl_tim.planning.lengths import Lengths
    from verl_tim.planning.phase import Phase
    from verl_tim.planning.plan import Memory, Misfit, Plan
    from verl_tim.planning.remedy import Remedy
    from verl_tim.planning.rollout_memory import RolloutMemory
    from verl_tim.planning.settings import Settings
    from verl_tim.planning.step_time import StepTime

_UNKNOWN_STEPS = ("steps", "unknown: the data are not here; give --steps")
_WIDE = 110  # columns of a terminal that has room for reasons


def show_on_host(name: str, plan: HostPlan) -> None:
    """A run that is on no GPU. `name`: of the config."""
    from verl_tim.planning.host_plan import NO_TIME
    from verl_tim.units import count, size

    s = plan.settings
    machines = "this machine, no GPU" if s.nodes == 1 else f"{s.nodes} machines as this one, no GPU"
    where = f"{machines}, {s.gpus} trainer process{'es' * (s.gpus != 1)}, {s.replicas} replica{'s' * (s.replicas != 1)}"
    title = f"{name}: {plan.shape.name}, {count(plan.shape.parameters)} parameters, {where}"
    memory, free = size(plan.host.memory), size(plan.host.available)
    title += f"\nAll processes on a machine together, of {memory} ({free} free now)"
    _show_memory(title, plan.phases, plan.host.memory)
    rows = _pool_rows(plan.rollout, s, plan.prompts, plan.answers)
    table("Rollout", ("", ""), [*rows, _lengths_row(plan.prompts, plan.answers, assumed=plan.assumed_means)])
    rows = [("tokens per step (drawn)", f"{plan.tokens:,.0f} ({plan.drawn:,.0f})"), ("time of a step", NO_TIME)]
    if plan.steps is None:
        rows.append(_UNKNOWN_STEPS)
    else:
        rows += [("steps", f"{plan.steps:,}"), ("tokens of the run", count(plan.tokens * plan.steps))]
    table("The run", ("", ""), rows)
    _show_misfits(plan.misfits)
    fullest = max(phase.total for phase in plan.phases)
    if plan.host.available < fullest <= plan.host.memory:
        stderr().print(f"[yellow]needs {size(fullest)}, and only {free} are free now: end what holds the rest first[/]")
    if not plan.fits:
        stderr().print(
            "  -> a machine with more memory, a smaller model, or micro-batches of fewer tokens "
            "(ppo_max_token_len_per_gpu); --gpu H100 plans for a GPU",
            soft_wrap=True,
        )


def show(name: str, plan: Plan, found: Sequence[Remedy]) -> None:
    """A run on GPUs, and with what it would fit where it does not. `name`: of the config."""
    from verl_tim.units import count, size

    memory, s = plan.memory, plan.memory.settings
    gpus = f"{s.gpus} x {memory.gpu.name}"
    where = f"{gpus}, {s.replicas} replica{'s' * (s.replicas != 1)} of {s.replica_gpus}"
    if s.cpu:
        stderr().print("[yellow]trainer.device=cpu: planned as if each of its processes had a GPU[/]")
    title = f"{name}: {memory.shape.name}, {count(memory.shape.parameters)} parameters, {where}"
    title += f"\nOn one GPU, of {size(memory.gpu.memory)} that PyTorch can see"
    _show_memory(title, memory.phases, memory.gpu.memory)
    if memory.host_bytes:
        stdout().print(f"On the host of each node: {size(memory.host_bytes)} of offloaded states.")
    _show_pool(plan)
    if plan.step is not None:
        _show_step(plan.step)
        _show_run(plan, plan.step)
    if not memory.fits:
        _refuse(memory, found)


def _show_memory(title: str, phases: Sequence[Phase], limit: float) -> None:
    """`limit`: bytes that a phase may hold."""
    from verl_tim.units import size

    names = list(dict.fromkeys(item.name for phase in phases for item in phase.items if item.nbytes >= 1e6))
    wide = stdout().width >= _WIDE
    rows = []
    for name in names:
        sizes = [sum(item.nbytes for item in phase.items if item.name == name) for phase in phases]
        some = next(item for phase in phases for item in phase.items if item.name == name and item.nbytes >= 1e6)
        why = some.why + (" (assumed)" if some.assumed else "")
        rows.append((name, *(size(one) if one else "" for one in sizes), *([why] if wide else [])))
    colours = ["red" if phase.total > limit else "green" for phase in phases]
    totals = [f"[bold {c}]{size(p.total)}[/]" for p, c in zip(phases, colours, strict=True)]
    rows.append(("[bold]in all[/]", *totals, *([""] if wide else [])))
    rows.append(("fullest at", *(phase.moment for phase in phases), *([""] if wide else [])))
    table(title, ("", *(phase.name for phase in phases), *(["why so much"] if wide else [])), rows)


def _show_pool(plan: Plan) -> None:
    rows = _pool_rows(plan.memory.rollout, plan.memory.settings, plan.prompts, plan.answers)
    if plan.step is not None:
        time = plan.step.rollout
        forecast = "none"
        if time.preemptions:
            forecast = f"{time.preemptions} sequences, {time.recomputed_tokens:,.0f} tokens computed again"
        rows.append(("most at once", f"{time.at_once} sequences, {time.most_context:,.0f} tokens"))
        rows.append(("preempted", forecast))
    table("Rollout", ("", ""), [*rows, _lengths_row(plan.prompts, plan.answers, assumed=plan.assumed_means)])


def _pool_rows(rollout: RolloutMemory, s: Settings, prompts: Lengths, answers: Lengths) -> list[tuple[str, str]]:
    mean = prompts.mean + answers.mean
    each = -(-s.sequences // s.replicas)
    return [
        ("KV pool of a replica", f"{rollout.pool_tokens:,} tokens"),
        ("sequences that a replica gets", f"{each:,}, at most {s.max_sequences} at once"),
        (f"that fit at the mean of {mean:,.0f} tokens", f"{int(rollout.pool_tokens / mean):,}"),
        (f"that fit at the longest of {s.longest:,} tokens", f"{int(rollout.pool_tokens / s.longest):,}"),
    ]


def _lengths_row(prompts: Lengths, answers: Lengths, *, assumed: bool) -> tuple[str, str]:
    means = "guessed: half of the longest" if assumed else "given"
    return (
        "lengths (mean / longest)",
        f"prompt {prompts.mean:,.0f} / {prompts.longest:,}, answer {answers.mean:,.0f} / {answers.longest:,}; "
        f"means {means}; largest entropy under both",
    )


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
        rows.append(_UNKNOWN_STEPS)
    table("The run", ("", ""), rows)


def _show_misfits(misfits: Sequence[Misfit]) -> None:
    from rich.text import Text

    for misfit in misfits:
        stderr().print(Text.assemble((f"{misfit.phase}: ", "bold red"), misfit.problem), soft_wrap=True)


def _refuse(memory: Memory, found: Sequence[Remedy]) -> None:
    from rich.text import Text

    console = stderr()
    _show_misfits(memory.misfits)
    if not found:
        console.print("  no change of these settings makes it fit: take larger GPUs, or a smaller model")
    for remedy in found:
        cost = (f"  (planned: fits; costs {remedy.cost})", "dim")
        console.print(Text.assemble(("  -> ", "bold"), " ".join(remedy.words), cost), soft_wrap=True)
