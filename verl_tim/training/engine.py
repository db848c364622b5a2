"""verl's FSDP engine with the forward pass of the numerics contract.

Selected by `actor_rollout_ref.model.fused_kernel_options.impl_backend=contract` with `use_fused_kernels=true`: verl
then takes `.log_probs` and `.entropy` from the model's output as they are (fsdp/transformer_impl.py:1362, 1456), and
`verl_tim.models.apply_contract` has replaced the model's forward by one that computes them in contract numerics. With
any other backend the class leaves verl's own path alone. Actor and reference model use the same class.

Numerics do not depend on FSDP: parameters are gathered before a module runs, in the compute dtype of FSDP2's mixed
precision, and the contract's forward sees plain tensors.

With either backend the loss of a run under a trainer of verl_tim is the one of `correction_step`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding

from verl_tim.numerics import determinism
from verl_tim.plugin import loaded
from verl_tim.replay import RoutingReplay
from verl_tim.sequence_parallel import SEQUENCE_PARALLEL_KEYS
from verl_tim.training.compute_device import compute_device
from verl_tim.training.config import (
    BACKEND_KEY,
    CONTRACT_BACKEND,
    DETERMINISTIC_LIB,
    VERL_BACKENDS,
    ConfigError,
)
from verl_tim.training.contract_limits import LIMITS, padding_too_long, value_in_worker
from verl_tim.training.correction_loss import response_fields
from verl_tim.training.correction_step import CorrectedUpdate, correction_of
from verl_tim.training.forward_records import FORWARD_METRIC, ForwardRecorder
from verl_tim.training.pairing import Card, IdentifiedWeights, card_of
from verl_tim.training.processes import trainer_name
from verl_tim.training.records import recording_loss
from verl_tim.training.replay_config import REPLAY_KEY, Mode, mode_of_engine
from verl_tim.training.replay_report import REPLAY_METRIC, Gap
from verl_tim.training.replay_step import ReplayStep


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
        # Mini-batches since the rollout was given weights, and whether nothing of the last one was kept.
        self._mini_batches = 0
        self._nothing_kept = False
        self._recorder = ForwardRecorder()
        self._replay_mode: Mode = "off" if engine_config.forward_only else mode_of_engine(engine_config)
        if self._replay_mode != "off":
            refuse_no_replay(model_config, engine_config)
        self.replay: ReplayStep | None = None
        # Rows of the micro-batch under way that are recorded: place -> row.
        self._recording: dict[int, int] = {}
        if DETERMINISTIC_LIB in sys.modules:
            # what the model draws while it is made (adapters) follows from verl's own key, the same on every rank
            determinism.seed_all(int(engine_config.seed))
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        if self.numerics == "contract":
            from verl_tim.models import apply_contract

            options = self.model_config.fused_kernel_options or {}
            self.contract = apply_contract(module, attention=options.get("attention") or "auto")
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
            device = compute_device()
            attention = self.contract.attention_on(device)
            probe(device, self.compute_dtype, self.contract.config.probe_shapes, attention=attention)
        if self._replay_mode != "off":
            contract = self.numerics == "contract"
            handles = RoutingReplay(module, contract=contract)
            self.replay = ReplayStep(self._replay_mode, handles, contract=contract)
            if contract:
                self.contract.choose = handles.choose
        return module

    def prepare_model_inputs(self, micro_batch):
        model_inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.numerics == "contract":
            wanted = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
            model_inputs["calculate_entropy"] = bool(wanted)
        self._recording = self._recorder.wanted(micro_batch) if self._rollout_has_weights else {}
        if self._recording and self.numerics == "contract":
            model_inputs["record_choices"] = True
        if self.replay is not None:
            self._input_ids = model_inputs["input_ids"]
            self.replay.begin(micro_batch, self._input_ids, packed=model_inputs["attention_mask"] is None)
        return model_inputs, output_args

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        if self.replay is not None:
            self.replay.end(micro_batch, self._input_ids)
        if self._recording:
            self._record(output, micro_batch)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    def _record(self, output, micro_batch) -> None:
        """Keep the choices of the sampled rows. Of plain transformers only the likeliest tokens, and nothing where
        verl's fused kernels leave no logits, or sequence parallelism a part of each sequence."""
        recording, self._recording = self._recording, {}
        if self.numerics == "contract":
            moe = self.contract.config.moe
            layers = () if moe is None else tuple(sorted(moe.layers))
            self._recorder.add(recording, micro_batch, top1=output.top1, routes=output.routes, layers=layers)
        elif not self.model_config.use_fused_kernels and not self.use_ulysses_sp:
            # before verl scales the logits in place
            self._recorder.add_from_logits(recording, micro_batch, output.logits)

    def forward_backward_batch(self, data, loss_function: Callable | None, forward_only: bool = False):
        if loss_function is None or forward_only:
            with nullcontext() if self.replay is None else self.replay.batch("old"):
                output: Any = super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[arg-type]
                if self.replay is not None and self.replay.probes:
                    self._probe(self.replay, data, output)
            return output
        with nullcontext() if self.replay is None else self.replay.batch("update"):
            return self._update_batch(data, loss_function)

    def _probe(self, replay: ReplayStep, data, output: Any) -> None:
        """One sequence of each rank once more, its routers choosing for themselves: what replay does to its log-probs.

        Every rank runs one, since their forwards gather parameters together.
        """
        one = tu.index_select_tensor_dict(data, [0])
        tu.assign_non_tensor(one, use_dynamic_bsz=False, micro_batch_size_per_gpu=1, calculate_entropy=False)
        with replay.free(), torch.no_grad():
            live: Any = super().forward_backward_batch(one, None, forward_only=True)  # type: ignore[arg-type]
        replayed = output["model_output"]["log_probs"].unbind()[0]
        fields = response_fields(one)
        if "rollout_log_probs" not in fields:
            return  # nothing to compare with
        gaps = []
        for log_probs in (live["model_output"]["log_probs"].unbind()[0], replayed):
            nested = torch.nested.as_nested_tensor([log_probs], layout=torch.jagged)
            log_prob_BT = no_padding_2_padding(nested, one)
            gaps.append(Gap.of(log_prob_BT, fields["rollout_log_probs"], fields["response_mask"]))
        replay.probed(*gaps)

    def _update_batch(self, data, loss_function: Callable) -> Any:
        number, self._mini_batches = self._mini_batches, self._mini_batches + 1
        configs = correction_of(loss_function, data)
        if configs is None:
            recording = recording_loss(loss_function, number=number, fresh=self._rollout_has_weights)
            return self._with_records(super().forward_backward_batch(data, recording))
        update = CorrectedUpdate(
            self, data, *configs, forward=self._forward_only, number=number, fresh=self._rollout_has_weights
        )
        output: Any = super().forward_backward_batch(data, update.loss)
        update.finish(output)
        self._nothing_kept = update.kept_tokens == 0
        return self._with_records(output)

    def _with_records(self, output: Any) -> Any:
        records = self._recorder.take()
        if records:
            output["metrics"][FORWARD_METRIC] = records
        reports = [] if self.replay is None else self.replay.take()
        if reports:
            output["metrics"][REPLAY_METRIC] = reports
        return output

    @contextmanager
    def disable_adapter(self):
        # the reference model's forward, in the actor's parameters
        with super().disable_adapter(), nullcontext() if self.replay is None else self.replay.free():
            yield

    def _forward_only(self, data):
        with torch.no_grad():
            return super().forward_backward_batch(data, None, forward_only=True)  # type: ignore[arg-type]

    def optimizer_step(self) -> float:
        if self._nothing_kept:
            # A step on a gradient of zero would still move the weights, by momentum and weight decay.
            self._nothing_kept = False
            self.optimizer_zero_grad()
            return 0.0
        self._rollout_has_weights = False
        return super().optimizer_step()

    def get_per_tensor_param(self, *args, **kwargs):
        self._rollout_has_weights, self._mini_batches = True, 0
        self._recorder.restart()
        if self.replay is not None:
            self.replay.clear()
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)
        if self.numerics == "contract":
            weights = IdentifiedWeights(weights, self._card)
        return weights, peft_config

    @functools.cached_property
    def _card(self) -> Card:
        """What the rollout compares with its own at each update."""
        from verl_tim.numerics.contract import contract_id

        device = compute_device()
        contract = contract_id(device, self.compute_dtype, self.contract.attention_on(device))
        return card_of(trainer_name(self.rank), contract, device.type)


def refuse_bypasses(model_config: Any, engine_config: Any) -> None:
    """Raise `ConfigError` for each setting that bypasses the contract, or that it does not cover."""
    found = []
    if engine_config.strategy != "fsdp2":
        found.append(
            f"actor_rollout_ref.actor.strategy={engine_config.strategy}: the contract is written for FSDP2; set "
            "strategy=fsdp2 for actor and ref"
        )
    for limit in LIMITS:
        if limit.key.startswith("actor." if engine_config.forward_only else "ref."):
            continue  # the other side's
        value = value_in_worker(limit.key, model_config, engine_config)
        if value is not None and limit.wrong(value):
            found.append(f"actor_rollout_ref.{limit.key}={value}: {limit.problem}; {limit.remedy.lower()}")
    context = getattr(model_config.hf_config, "max_position_embeddings", None)
    if engine_config.pad_to_length and context is not None:
        side = "ref" if engine_config.forward_only else "actor"
        too_long = padding_too_long(side, engine_config.pad_to_length_bucket, context)
        if too_long:
            found.append(f"{too_long.key}: {too_long.problem}; {too_long.remedy}")
    dtype = str((engine_config.mixed_precision or {}).get("param_dtype", "bf16"))
    if dtype in ("fp16", "float16", "half"):
        found.append(
            f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={dtype}: the contract covers bf16, and "
            "fp32 on CPUs; choose one of them"
        )
    if found:
        raise ConfigError(f"{BACKEND_KEY}={CONTRACT_BACKEND} cannot hold with " + "\n".join(found))


def refuse_no_replay(model_config: Any, engine_config: Any) -> None:
    """Raise `ConfigError` for each setting under which this worker could not replay routes; the start-up checks say the
    same of a run's config (`replay_checks`)."""
    found = []
    if engine_config.strategy != "fsdp2":
        found.append(f"actor_rollout_ref.actor.strategy={engine_config.strategy}: set it to fsdp2")
    if int(engine_config.ulysses_sequence_parallel_size) > 1:
        found.append(f"{' or '.join(SEQUENCE_PARALLEL_KEYS)} above 1: set it to 1")
    if model_config.enable_activation_offload:
        found.append("actor_rollout_ref.model.enable_activation_offload=true: set it to false")
    if found:
        raise ConfigError(f"{REPLAY_KEY} cannot take effect with " + "\n".join(found))


loaded(__name__)
