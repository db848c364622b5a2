"""verl's FSDP engine with the forward pass of the numerics contract.

Selected by `actor_rollout_ref.model.fused_kernel_options.impl_backend=contract` with `use_fused_kernels=true`: verl
then takes `.log_probs` and `.entropy` from the model's output as they are (fsdp/transformer_impl.py:1362, 1456), and
`verl_tim.models.apply_contract` has replaced the model's forward by one that computes them in contract numerics. With
any other backend the class leaves verl's own path alone. Actor and reference model use the same class.

Numerics do not depend on FSDP: parameters are gathered before a module runs, in the compute dtype of FSDP2's mixed
precision, and the contract's forward sees plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_tim.plugin import loaded
from verl_tim.training.config import BACKEND_KEY, CONTRACT_BACKEND, VERL_BACKENDS, ConfigError
from verl_tim.training.records import recording_loss


def numerics_of(model_config: Any) -> str:
    """Either "contract" or "stock", from a worker's `HFModelConfig`.

    Raises:
        ConfigError: an unknown backend, which verl would skip silently, or the contract without `use_fused_kernels`.
    """
    options = model_config.fused_kernel_options or {}
    backend = options.get("impl_backend") if isinstance(options, Mapping) or hasattr(options, "get") else None
    if backend == CONTRACT_BACKEND:
        if not model_config.use_fused_kernels:
            raise ConfigError(
                f"{BACKEND_KEY}={CONTRACT_BACKEND} needs actor_rollout_ref.model.use_fused_kernels=true: without it "
                "verl computes log-probs from logits and the contract would be bypassed"
            )
        return "contract"
    if model_config.use_fused_kernels and backend not in VERL_BACKENDS:
        raise ConfigError(
            f"{BACKEND_KEY}={backend!r} is unknown: choose {CONTRACT_BACKEND}, or verl's {', '.join(VERL_BACKENDS)}"
        )
    return "stock"


class ContractFSDPEngineWithLMHead(FSDPEngineWithLMHead):
    """`FSDPEngineWithLMHead` whose log-probs follow the numerics contract when the model config asks for it."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.numerics = numerics_of(model_config)
        if self.numerics == "contract":
            refuse_bypasses(model_config, engine_config)
        # handle of the replaced forward: its table, and a count of the forwards that ran
        self.contract: Any = None
        # True while the parameters are those the rollout was last given: log-probs seen then are p_old.
        self._rollout_has_weights = False
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        if self.numerics == "contract":
            from verl_tim.models import apply_contract

            self.contract = apply_contract(module)
        return module

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        module = super()._build_fsdp_module(module)
        # verl uses this dtype for its autocast only, but it is the compute dtype of FSDP2's mixed precision, too.
        self.compute_dtype = self._autocast_dtype
        if self.numerics == "contract":
            # An autocast around the forward would round where the contract does not (forward_step).
            self._autocast_dtype = torch.float32
            from verl_tim.numerics.probe import probe

            # Raises where this process's kernels do not keep the contract at the model's shapes.
            probe(next(module.parameters()).device, self.compute_dtype, self.contract.config.probe_shapes)
        return module

    def prepare_model_inputs(self, micro_batch):
        model_inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.numerics == "contract":
            wanted = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
            model_inputs["calculate_entropy"] = bool(wanted)
        return model_inputs, output_args

    def forward_backward_batch(self, data, loss_function: Callable | None, forward_only: bool = False):
        if loss_function is not None and not forward_only:
            loss_function = recording_loss(loss_function, fresh=self._rollout_has_weights)
        return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[arg-type]

    def optimizer_step(self) -> float:
        self._rollout_has_weights = False
        return super().optimizer_step()

    def get_per_tensor_param(self, *args, **kwargs):
        self._rollout_has_weights = True
        return super().get_per_tensor_param(*args, **kwargs)


def refuse_bypasses(model_config: Any, engine_config: Any) -> None:
    """Raise `ConfigError` for each setting that bypasses the contract, or that it does not cover."""
    tiled = model_config.tiled_mlp or {}
    lora = model_config.lora or {}
    mixed_precision = engine_config.mixed_precision or {}
    refusals = (
        (
            engine_config.strategy != "fsdp2",
            f"actor_rollout_ref.actor.strategy={engine_config.strategy}",
            "the contract is written for FSDP2: set strategy=fsdp2 for actor and ref",
        ),
        (
            engine_config.ulysses_sequence_parallel_size > 1,
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            "sequence parallelism splits sequences across ranks: set it to 1",
        ),
        (
            model_config.lora_rank > 0 or lora.get("rank", 0) > 0 or model_config.lora_adapter_path is not None,
            "actor_rollout_ref.model.lora_rank",
            "LoRA adapters are outside the contract: set lora_rank=0 and lora_adapter_path=null",
        ),
        (
            model_config.use_liger,
            "actor_rollout_ref.model.use_liger",
            "Liger replaces modules that the contract computes: set it to false",
        ),
        (
            bool(tiled.get("enabled", False)),
            "actor_rollout_ref.model.tiled_mlp.enabled",
            "tiled MLP replaces modules that the contract computes: set it to false",
        ),
        (
            bool(getattr(engine_config.qat, "enable", False)),
            "actor_rollout_ref.actor.fsdp_config.qat.enable",
            "quantisation-aware training is outside the contract: set it to false",
        ),
        (
            model_config.mtp.enable,
            "actor_rollout_ref.model.mtp.enable",
            "multi-token prediction is outside the contract: set it to false",
        ),
        (
            str(mixed_precision.get("param_dtype", "bf16")) in ("fp16", "float16", "half"),
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
            "the contract covers bf16, and fp32 on CPUs: choose one of them",
        ),
    )
    found = [f"{key}: {remedy}" for wrong, key, remedy in refusals if wrong]
    if found:
        raise ConfigError(f"{BACKEND_KEY}={CONTRACT_BACKEND} cannot hold with " + "; ".join(found))


loaded(__name__)
