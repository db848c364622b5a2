"""`verl-tim plan`: does a run fit its GPUs, or this machine, what does it hold in each phase, how long will it take?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from verl_tim.commands.output import bad_input, print_json, print_text, table
from verl_tim.commands.plan_tables import show, show_on_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_tim.planning.gpu import Gpu

NAME = "plan"
HELP = (
    "Memory of each phase, time of a step and cost of a run, before anything is started.\n\n"
    "[dim]verl-tim plan cpu_grpo cluster=gpu1 model=hf actor_rollout_ref.model.path=Qwen/Qwen3-1.7B --gpu H100\n\n"
    "verl-tim plan my_run.yaml trainer.nnodes=8 --mean-response 6000\n\n"
    "verl-tim plan cpu_grpo    [not dim]without a GPU: the memory of this machine[/]\n\n"
    "verl-tim plan --anchors    [not dim]what the formulas predict beside what was measured[/]\n\n"
    "verl-tim plan --scaling    [not dim]the tables of docs/scaling.md[/][/]\n\n"
    "Exit code: 0 it fits, 1 it does not (with remedies that were planned), 2 the config cannot be planned."
)


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE | FILE.yaml | RUN_FOLDER] [KEY=VALUE]...", help="A config, then overrides."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="The GPU: H200, H100, 'A100 80GB', 'A100 40GB', L40S, B200. Default: H200; for a config with "
            "trainer.device=cpu no GPU, but the memory of this machine."
        ),
    ] = None,
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
    from verl_tim.planning.gpu import DEFAULT_GPU, find_gpu

    with bad_input():
        if anchors and scaling:
            raise LaunchError.of("--anchors", "is given beside --scaling", "give one of the two")
        if (anchors or scaling) and words:
            raise LaunchError.of(words[0], "is given beside --anchors or --scaling", "leave it out")
        if not (anchors or scaling or words):
            raise LaunchError.of("RECIPE", "is not given", "name a recipe or a YAML: verl-tim plan cpu_grpo")
        chosen = None if gpu is None else find_gpu(gpu)
        if anchors:
            _anchors(as_json)
        elif scaling:
            from verl_tim.planning.scaling import forecasts, markdown

            rows = forecasts(chosen or find_gpu(DEFAULT_GPU))
            print_json([row.to_mapping() for row in rows]) if as_json else print_text(markdown(rows) + "\n")
        else:
            _plan(words or [], chosen, shape, mean_prompt, mean_response, steps, as_json)


def _plan(
    words: Sequence[str], gpu: Gpu | None, shape: str | None, mean_prompt: float | None, mean_response: float | None,
    steps: int | None, as_json: bool,
) -> None:  # fmt: skip
    from omegaconf import OmegaConf

    from verl_tim.planning.gpu import DEFAULT_GPU, find_gpu
    from verl_tim.planning.host import Host
    from verl_tim.planning.host_plan import make_host_plan
    from verl_tim.planning.plan import make_plan
    from verl_tim.planning.remedy import remedies
    from verl_tim.planning.shape import find_shape
    from verl_tim.planning.source import planned, steps_of

    source = planned(words)
    config = source.config
    model = find_shape(
        config.actor_rollout_ref.model.path, kind=OmegaConf.select(config, "tim.model.kind"), given=shape
    )
    lengths = {"mean_prompt": mean_prompt, "mean_answer": mean_response}
    steps = steps or steps_of(config)
    if gpu is None and OmegaConf.select(config, "trainer.device") == "cpu":
        on_host = make_host_plan(config, model, Host.here(), **lengths, steps=steps)
        if as_json:
            print_json({"source": source.name, **on_host.to_mapping(), "remedies": []})
        else:
            show_on_host(source.name, on_host)
        if not on_host.fits:
            raise typer.Exit(1)
        return
    gpu = gpu or find_gpu(DEFAULT_GPU)
    plan = make_plan(config, model, gpu, **lengths, steps=steps)
    found = [] if plan.memory.fits else remedies(config, model, gpu)
    if as_json:
        means = [{"overrides": one.words, "cost": one.cost} for one in found]
        print_json({"source": source.name, **plan.to_mapping(), "remedies": means})
    else:
        show(source.name, plan, found)
    if not plan.memory.fits:
        raise typer.Exit(1)


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
