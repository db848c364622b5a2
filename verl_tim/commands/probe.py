"""`verl-tim probe`: one checkpoint, no training; how far the trainer's log-probs are from the rollout's."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_tim.commands.output import bad_input, print_json, stderr, stdout, writing
from verl_tim.commands.places import refuse_foreign
from verl_tim.commands.quiet import quiet_libraries

if TYPE_CHECKING:
    from verl_tim.verification.answers import Answer
    from verl_tim.verification.engine_dump import DumpedSequence
    from verl_tim.verification.probe import ProbeReport
    from verl_tim.verification.probe_settings import ProbeSettings

NAME = "probe"
HELP = (
    "One checkpoint, no training: a rollout answers prompts, the trainer re-scores the same tokens. |d| per batch, its "
    "histogram with the tail, and the tokens at which the likeliest one flips."
)


def command(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Folder of a Hugging Face model.")] = None,
    rollout: Annotated[str | None, typer.Option(help="vexact (default), stock or vllm.")] = None,
    trainer: Annotated[str | None, typer.Option(help="contract (default), or stock: verl's own forward.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Parquet file in verl's schema; may be repeated.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Compute dtype of both sides; default bfloat16.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Rows of each file; default 32.")] = None,
    responses: Annotated[int | None, typer.Option(help="Per prompt, at different seeds; default 1.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0, the default, is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of a response; default 256.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Responses drawn together; default 16.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; default 0.")] = None,
    settings: Annotated[
        Path | None, typer.Option(help="YAML file with these options as keys; options given here win.")
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(help="Also write tokens and log-probs to this .npz, .safetensors or .parquet, for verify --dump."),
    ] = None,
    hidden: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --dump: only this many responses, with the rollout's hidden states (vllm: by hooks, eager).",
        ),
    ] = 0,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for probe.html and probe.json; default: the current one. "
            "Those of an earlier call are replaced."
        ),
    ] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of the tables.")] = False,
) -> None:
    """Probe."""
    given = {
        "model": model,
        "rollout": rollout,
        "trainer": trainer,
        "data": data,
        "dtype": dtype,
        "prompts": prompts,
        "responses": responses,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "batch_size": batch_size,
        "seed": seed,
    }
    with bad_input(), writing():
        refuse_foreign(out / "probe.json", out / "probe.html")
        out.mkdir(parents=True, exist_ok=True)  # before the work, so that none is lost
    with bad_input():
        report = run(settings_of(settings, given), dump=dump, hidden=hidden)
    json_path = out / "probe.json"
    import json

    with bad_input(), writing():
        json_path.write_text(json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        html_path = report.page().write(out / "probe.html")
    if as_json:
        print_json(report.to_dict())
    else:
        stdout().print(report.table())
        stdout().print(report.summary(), soft_wrap=True)
    stderr().print(f"page: {html_path.absolute()}\nJSON: {json_path.absolute()}", soft_wrap=True)


def settings_of(file: Path | None, given: dict[str, Any]) -> ProbeSettings:
    """Checked settings; LaunchError with key and remedy for what cannot be used."""
    from verl_tim.launch.errors import LaunchError
    from verl_tim.verification.probe_settings import ProbeSettings, SettingsError

    try:
        return ProbeSettings.of(file, given)
    except SettingsError as error:
        raise LaunchError.of(error.key, error.problem, error.remedy) from error


def run(settings: ProbeSettings, *, dump: Path | None = None, hidden: int = 0) -> ProbeReport:
    """Answer, re-score, measure.

    Args:
        dump: file that gets the responses (`verification.engine_dump`); hidden: the first that many, with the
            rollout's hidden states; 0 writes all without.

    Raises:
        LaunchError: the data hold no usable prompts, a prompt does not fit, the model has no contract, or vLLM is not
            installed.
    """
    from transformers import AutoTokenizer

    from verl_tim.commands.model_folder import refuse_unreadable
    from verl_tim.commands.progress import Work
    from verl_tim.engine.errors import EngineConfigError, RequestError
    from verl_tim.launch.errors import LaunchError
    from verl_tim.models import ModelError
    from verl_tim.training.in_process import InProcessTrainer, single_rank_group
    from verl_tim.verification.answers import trainer_scores
    from verl_tim.verification.engine_dump import SUFFIXES, write_dump
    from verl_tim.verification.probe import probe
    from verl_tim.verification.prompts import PromptError, read_prompts
    from verl_tim.verification.vllm_engine import VllmError

    if hidden and dump is None:
        raise LaunchError.of("--hidden", "has no file to go to", "give --dump FILE.safetensors")
    if dump is not None and dump.suffix not in ((".npz", ".safetensors") if hidden else SUFFIXES):
        raise LaunchError.of(
            "--dump",
            f"{dump.suffix or 'no suffix'} cannot hold that",
            "write .safetensors or .npz (.parquet: no --hidden)",
        )
    if dump is not None and not dump.absolute().parent.is_dir():
        raise LaunchError.of("--dump", f"there is no folder {dump.absolute().parent}", "make it, or give another file")
    if dump is not None:
        refuse_foreign(dump, key="--dump")
    refuse_unreadable(settings.model, "config", "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    try:
        prompts = read_prompts(settings.data, tokenizer, limit=settings.prompts)
        with quiet_libraries(), single_rank_group():
            # drawn before the trainer is made: on one GPU the two need the memory one after the other
            asked = [prompt for prompt in prompts for _ in range(settings.responses)]
            side = _Rollout(settings, max(len(prompt) for prompt in prompts), taps=hidden > 0)
            batches = []
            with Work("drawing", -(-len(asked) // settings.batch_size)) as work:
                for batch in side.batches(asked):
                    batches.append(batch)
                    work.advance()
            if dump is not None:
                with writing("--dump"):
                    write_dump(dump, side.dumped([answer for batch in batches for answer in batch], hidden))
            del side
            gc.collect()
            trainer = InProcessTrainer(settings.model, dtype=settings.dtype, numerics=settings.trainer)
            with Work("scoring again", len(asked)) as work:

                def score(answer: Answer) -> Any:
                    work.advance()
                    return trainer_scores(trainer, answer)

                return probe(
                    batches,
                    score,
                    lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
                    _facts(settings),
                )
    except PromptError as error:
        raise LaunchError.of("--data", str(error), "verl-tim data makes such files") from error
    except (RequestError, EngineConfigError) as error:
        raise LaunchError.of("--max-tokens", str(error), "take shorter prompts, or another model") from error
    except ModelError as error:
        raise LaunchError.of("MODEL", str(error), "give a Hugging Face folder of a supported architecture") from error
    except VllmError as error:
        raise LaunchError.of("--rollout", str(error), "or choose --rollout vexact or stock") from error


class _Rollout:
    """The side that draws: our engine, or vLLM's.

    Args:
        longest: tokens of the longest prompt.
        taps: hidden states will be asked for; vLLM then runs eagerly.
    """

    def __init__(self, settings: ProbeSettings, longest: int, *, taps: bool) -> None:
        import torch

        from verl_tim.engine.config import EngineConfig
        from verl_tim.engine.engine import Engine
        from verl_tim.verification.vllm_engine import make_llm

        self.settings = settings
        self.engine: Any
        if settings.rollout == "vllm":
            room = longest + settings.max_tokens + 1  # one more: a response is read again with a token after it
            self.engine = make_llm(
                settings.model, dtype=settings.dtype, max_model_len=room, seed=settings.seed, taps=taps
            )
        else:
            self.engine = Engine(
                EngineConfig(
                    model_path=settings.model,
                    dtype=settings.dtype,
                    device="cuda" if torch.cuda.is_available() else "cpu",
                    numerics="contract" if settings.rollout == "vexact" else "stock",
                    seed=settings.seed,
                )
            )

    def batches(self, prompts: Sequence[Any]) -> Iterator[list[Answer]]:
        """Responses, batch by batch."""
        from verl_tim.verification.answers import engine_answers
        from verl_tim.verification.vllm_engine import vllm_answers

        settings = self.settings
        draw = vllm_answers if settings.rollout == "vllm" else engine_answers
        for first in range(0, len(prompts), settings.batch_size):
            yield draw(
                self.engine,
                prompts[first : first + settings.batch_size],
                temperature=settings.temperature,
                max_tokens=settings.max_tokens,
                seed=settings.seed + first,
            )

    def dumped(self, answers: list[Answer], hidden: int) -> list[DumpedSequence]:
        """What goes into a dump: all responses, or the first few with hidden states."""
        from verl_tim.verification.engine_dump import dumped_answer
        from verl_tim.verification.forward import LOG_PROB, engine_forward
        from verl_tim.verification.vllm_engine import hidden_states

        if not hidden:
            return [dumped_answer(answer, {}) for answer in answers]
        chosen = answers[:hidden]
        if self.settings.rollout == "vllm":
            states = hidden_states(self.engine, chosen)
        else:
            forwards = [engine_forward(self.engine, answer.tokens, answer.temperature) for answer in chosen]
            states = [{name: x for name, x in f.taps.items() if name != LOG_PROB} for f in forwards]
        return [dumped_answer(answer, taps) for answer, taps in zip(chosen, states, strict=True)]


def _facts(settings: ProbeSettings) -> dict[str, Any]:
    import torch

    from verl_tim.rollout.vllm_cpu import installed

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    version = {"rollout version": str(installed())} if settings.rollout == "vllm" else {}
    return {
        "model": settings.model,
        "rollout": settings.rollout,
        **version,
        "trainer": settings.trainer,
        "dtype": settings.dtype,
        "device": device,
        "temperature": settings.temperature or "greedy",
        "most tokens": settings.max_tokens,
        "data": ", ".join(settings.data),
        "seed": settings.seed,
    }
