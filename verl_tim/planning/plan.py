"""A run's plan: its phases' memory, whether they fit, and what a step will take if they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_tim.planning.gpu import Gpu
from verl_tim.planning.lengths import Lengths, lengths
from verl_tim.planning.phase import Phase
from verl_tim.planning.phases import phases
from verl_tim.planning.rates import Speeds
from verl_tim.planning.rollout_memory import RolloutMemory
from verl_tim.planning.settings import ROLLOUT, Settings, read_settings
from verl_tim.planning.shape import Shape
from verl_tim.planning.step_time import StepTime, step_time
from verl_tim.units import size


@dataclass(frozen=True)
class Misfit:
    """One reason why a run cannot be.

    Attributes:
        phase: name of the phase.
        problem: what is too large, with figures.
    """

    phase: str
    problem: str


@dataclass(frozen=True)
class Memory:
    """A run's memory on one GPU."""

    shape: Shape
    settings: Settings
    gpu: Gpu
    phases: tuple[Phase, ...]

    @property
    def rollout(self) -> RolloutMemory:
        return RolloutMemory(self.shape, self.settings, self.gpu.memory)

    @property
    def host_bytes(self) -> float:
        """Bytes of states on the host of one node, at the most: what is offloaded, and the reference model."""
        s = self.settings
        each = self.shape.parameters * s.master_bytes / s.shards
        parts = 4 * s.offload_policy or s.param_offload + 2 * s.optimizer_offload
        return each * (parts + s.reference) * s.gpus_per_node

    @property
    def misfits(self) -> list[Misfit]:
        """Empty where the run fits."""
        found = []
        for phase in self.phases:
            if problem := phase.problem(self.gpu.memory, self.gpu.name):
                found.append(Misfit(phase.name, problem))
        rollout, s = self.rollout, self.settings
        if rollout.pool_tokens < s.max_model_length:
            found.append(
                Misfit(
                    "rollout",
                    f"the KV pool would hold {rollout.pool_tokens:,} tokens ({size(max(0.0, rollout.pool))} of "
                    f"{ROLLOUT}.gpu_memory_utilization={s.utilization:g}), less than one sequence of "
                    f"{s.max_model_length:,}; weights {size(rollout.weights)}, a step "
                    f"{size(rollout.activations)}",
                )
            )
        return found

    @property
    def fits(self) -> bool:
        return not self.misfits


def memory_of(config: DictConfig | Mapping[str, Any], shape: Shape, gpu: Gpu) -> Memory:
    """Raises LaunchError for a config that a plan cannot speak of."""
    settings = read_settings(config, shape)
    return Memory(shape, settings, gpu, phases(shape, settings, gpu))


@dataclass(frozen=True)
class Plan:
    """A whole plan.

    Attributes:
        memory: always there.
        prompts, answers: the assumed lengths; assumed_means: their means were not given.
        step: None where the memory does not fit.
        steps: of the run; None where the config does not say.
    """

    memory: Memory
    prompts: Lengths
    answers: Lengths
    assumed_means: bool
    step: StepTime | None
    steps: int | None

    @property
    def gpu_hours(self) -> float | None:
        if self.step is None or self.steps is None:
            return None
        return self.step.seconds * self.steps * self.memory.settings.gpus / 3600

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        memory, s = self.memory, self.memory.settings
        rollout = memory.rollout
        return {
            "fits": memory.fits,
            "model": memory.shape.name,
            "parameters": memory.shape.parameters,
            "gpu": {"name": memory.gpu.name, "memory": memory.gpu.memory, "source": memory.gpu.source},
            "gpus": s.gpus,
            "replicas": s.replicas,
            "phases": [phase.to_mapping() for phase in memory.phases],
            "host_bytes_per_node": round(memory.host_bytes),
            "misfits": [vars(misfit) for misfit in memory.misfits],
            "kv_pool": {
                "tokens": rollout.pool_tokens,
                "bytes_per_token": rollout.token_bytes,
                "sequences_at_mean": self._sequences(self.prompts.mean + self.answers.mean),
                "sequences_at_longest": self._sequences(s.longest),
            },
            "lengths": lengths_mapping(self.prompts, self.answers, assumed=self.assumed_means),
            "step": None if self.step is None else _step_mapping(self.step),
            "run": {
                "steps": self.steps,
                "gpu_hours": self.gpu_hours,
                "tokens": None if self.step is None or self.steps is None else self.step.tokens * self.steps,
                "drawn_tokens": None if self.step is None or self.steps is None else self.step.drawn * self.steps,
            },
        }

    def _sequences(self, length: float) -> int:
        return int(self.memory.rollout.pool_tokens / length)


def lengths_mapping(prompts: Lengths, answers: Lengths, *, assumed: bool) -> dict[str, Any]:
    """Plain values, for JSON; `assumed`: the means were not given."""
    return {
        "prompt": {"mean": prompts.mean, "longest": prompts.longest},
        "answer": {"mean": answers.mean, "longest": answers.longest},
        "means_assumed": assumed,
        "distribution": "largest entropy for that mean and longest",
    }


def _step_mapping(step: StepTime) -> dict[str, Any]:
    rollout = step.rollout
    return {
        "seconds": step.seconds,
        "parts": [
            {"name": part.name, "seconds": part.seconds, "of": part.of, "basis": list(part.basis)}
            for part in step.parts
        ],
        "tokens": step.tokens,
        "drawn_tokens": step.drawn,
        "rollout": {**vars(rollout), "tokens_per_second": rollout.tokens_per_second,
                    "share_of_floor": rollout.share_of_floor},
    }  # fmt: skip


def make_plan(
    config: DictConfig | Mapping[str, Any],
    shape: Shape,
    gpu: Gpu,
    *,
    mean_prompt: float | None = None,
    mean_answer: float | None = None,
    steps: int | None = None,
) -> Plan:
    """The plan of a resolved config.

    Raises:
        LaunchError: keys that a plan cannot speak of, means that cannot be.
    """
    memory = memory_of(config, shape, gpu)
    s = memory.settings
    prompts = lengths(s.prompt_length, mean_prompt, "--mean-prompt")
    answers = lengths(s.response_length, mean_answer, "--mean-response")
    step = step_time(shape, s, Speeds(gpu), prompts, answers) if memory.fits else None
    return Plan(memory, prompts, answers, mean_prompt is None or mean_answer is None, step, steps if steps else s.steps)
