"""The plan of a run that is on no GPU: does it fit the machine in hand? How long a step takes there, nothing measured
tells, so nothing is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_tim.planning.host import Host
from verl_tim.planning.host_phases import HostRollout, host_phases, on_host, rollout_on
from verl_tim.planning.lengths import Lengths, lengths
from verl_tim.planning.phase import Phase
from verl_tim.planning.plan import Misfit, lengths_mapping
from verl_tim.planning.settings import Settings, read_settings
from verl_tim.planning.shape import Shape

NO_TIME = "not estimated: there are no rates of CPUs; the first steps of the run tell"


@dataclass(frozen=True)
class HostPlan:
    """A run's memory on one machine without a GPU.

    Attributes:
        settings: with nothing offloaded.
        prompts, answers: the assumed lengths; assumed_means: their means were not given.
        steps: of the run; None where the config does not say.
    """

    shape: Shape
    settings: Settings
    host: Host
    phases: tuple[Phase, ...]
    prompts: Lengths
    answers: Lengths
    assumed_means: bool
    steps: int | None

    @property
    def rollout(self) -> HostRollout:
        return rollout_on(self.shape, self.settings, self.host)

    @property
    def misfits(self) -> list[Misfit]:
        """Empty where the run fits."""
        of = "this machine" if self.settings.nodes == 1 else "each machine, if it is as this one"
        found = [
            Misfit(phase.name, problem)
            for phase in self.phases
            if (problem := phase.problem(self.host.memory, of)) is not None
        ]
        if self.rollout.pool_tokens < self.settings.max_model_length:
            problem = (
                f"the KV pool would hold {self.rollout.pool_tokens:,} tokens, less than one sequence of "
                f"{self.settings.max_model_length:,}"
            )
            found.append(Misfit("rollout", problem))
        return found

    @property
    def fits(self) -> bool:
        return not self.misfits

    @property
    def drawn(self) -> float:
        """Tokens of a step's answers."""
        return self.settings.sequences * self.answers.mean

    @property
    def tokens(self) -> float:
        """Tokens of a step, prompts too."""
        return self.drawn + self.settings.sequences * self.prompts.mean

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        s, rollout = self.settings, self.rollout
        return {
            "fits": self.fits,
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "machine": {"memory": self.host.memory, "available": self.host.available},
            "machines": s.nodes,
            "processes": s.gpus,
            "replicas": s.replicas,
            "phases": [phase.to_mapping() for phase in self.phases],
            "misfits": [vars(misfit) for misfit in self.misfits],
            "kv_pool": {
                "tokens": rollout.pool_tokens,
                "bytes_per_token": rollout.token_bytes,
                "sequences_at_mean": int(rollout.pool_tokens / (self.prompts.mean + self.answers.mean)),
                "sequences_at_longest": int(rollout.pool_tokens / s.longest),
            },
            "lengths": lengths_mapping(self.prompts, self.answers, assumed=self.assumed_means),
            "step": None,
            "step_time": NO_TIME,
            "run": {
                "steps": self.steps,
                "tokens": None if self.steps is None else self.tokens * self.steps,
                "drawn_tokens": None if self.steps is None else self.drawn * self.steps,
            },
        }


def make_host_plan(
    config: DictConfig | Mapping[str, Any],
    shape: Shape,
    host: Host,
    *,
    mean_prompt: float | None = None,
    mean_answer: float | None = None,
    steps: int | None = None,
) -> HostPlan:
    """The plan of a resolved config with `trainer.device=cpu`.

    Raises:
        LaunchError: keys that a plan cannot speak of, means that cannot be.
    """
    settings = on_host(read_settings(config, shape))
    prompts = lengths(settings.prompt_length, mean_prompt, "--mean-prompt")
    answers = lengths(settings.response_length, mean_answer, "--mean-response")
    return HostPlan(
        shape,
        settings,
        host,
        host_phases(shape, settings, host),
        prompts,
        answers,
        mean_prompt is None or mean_answer is None,
        steps if steps else settings.steps,
    )
