"""vLLM's builds for CPUs: how they are told from others, and how a weight update reaches their layers."""

import importlib
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import torch

from verl_tim.rollout import vllm_cpu


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Of vLLM only what is added here is installed."""
    monkeypatch.setattr(
        sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, vllm_cpu.CpuBuildFinder)]
    )
    here = [path for path in sys.path if not any(metadata.distributions(name="vllm-cpu", path=[path]))]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *here])

    def add(name, version):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return add


@pytest.mark.skipif(any(metadata.distributions(name="vllm")), reason="vLLM is installed here")
def test_the_build_for_cpus_answers_to_vllms_name(packages):
    vllm_cpu.answer_to_vllm()
    assert vllm_cpu.installed() is None
    assert not vllm_cpu.is_cpu_build()
    packages("vllm-cpu", "0.28.0")
    assert vllm_cpu.installed() == "0.28.0+cpu", "before anybody is to answer"
    vllm_cpu.answer_to_vllm()
    assert metadata.version("vllm") == "0.28.0+cpu"
    assert vllm_cpu.is_cpu_build()
    importlib.invalidate_caches()  # asks every finder
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("no-such-package")


@pytest.mark.skipif(any(metadata.distributions(name="vllm")), reason="vLLM is installed here")
@pytest.mark.parametrize(("version", "for_cpus"), [("0.24.0", False), ("0.24.0+cpu", True), ("0.24.0+cu130", False)])
def test_vllm_itself_comes_first(packages, version, for_cpus):
    packages("vllm", version)
    packages("vllm-cpu", "0.28.0")
    vllm_cpu.answer_to_vllm()
    assert metadata.version("vllm") == version
    assert vllm_cpu.installed() == version
    assert vllm_cpu.is_cpu_build() is for_cpus


# ------------------------------------------------------------------------------------------------------- weight updates


@pytest.fixture
def told(monkeypatch):
    """Stand-ins for what of vLLM an update uses; what was called, in order."""
    told = []

    def module(name, **contents):
        made = ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader", "vllm.model_executor.layers"):
        module(name)
    module("vllm.model_executor.layers.vocab_parallel_embedding", ParallelLMHead=Head)
    module("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: told.on_cpu))
    module(
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=lambda model: told.append("layers wait"),
        finalize_layerwise_reload=lambda model, config: told.append(f"layers done {config}"),
    )
    utils = module(
        "vllm.model_executor.model_loader.utils", process_weights_after_loading=lambda *a: told.append("verl processes")
    )
    sys.modules["vllm.model_executor.model_loader"].utils = utils

    class Told(list):
        on_cpu = True

    told = Told()
    return told


class Head(SimpleNamespace):
    """vLLM's ParallelLMHead."""


def verls_module(told, kernels, *, tied=False):
    class Extension:
        def __init__(self):
            methods = [SimpleNamespace(moe_kernel=kernel) for kernel in kernels]
            layers = [SimpleNamespace(quant_method=method) for method in methods] + [SimpleNamespace()]
            packing = SimpleNamespace(process_weights_after_loading=lambda layer: told.append("head packed"))
            layers.append(Head(quant_method=packing))
            config = SimpleNamespace(tie_word_embeddings=tied)
            self.methods, self.model = methods, SimpleNamespace(modules=lambda: layers, config=config)
            self.seen = []

        def _iter_all_models(self):
            yield self.model

        def _iter_all_models_with_config(self):
            yield self.model, "config"

        def _update_weights(self, weights, peft_config):
            self.seen += weights

        def update_weights_from_ipc(self, bucket):
            from vllm.model_executor.model_loader.utils import process_weights_after_loading

            module.patch_vllm_moe_model_weight_loader(self.model)
            told.append(f"kernels {[method.moe_kernel for method in self.methods]}")
            self._update_weights([("w", bucket)], peft_config=None)
            if told.fails:
                raise RuntimeError("broken off")
            bucket.zero_()  # the next bucket
            process_weights_after_loading(self.model)
            return "done"

    module = ModuleType("verls")
    module.vLLMColocateWorkerExtension = Extension
    module.patch_vllm_moe_model_weight_loader = lambda model: told.append("verl's loaders")
    told.fails = False
    vllm_cpu.reload_by_layers(module)
    return module


def test_an_update_on_a_cpu_is_left_to_the_layers(told):
    worker = verls_module(told, ["packed", None]).vLLMColocateWorkerExtension()
    assert worker.update_weights_from_ipc(torch.ones(3)) == "done"
    assert told == ["layers wait", "kernels [None, None]", "layers done config"]
    assert worker.seen[0][1].tolist() == [1, 1, 1], "not a view of what the next bucket is written over"


def test_a_tied_head_is_packed_of_the_embeddings_new_weights(told):
    """It has none of its own in an update, so the layers' reload leaves it as it was packed first."""
    worker = verls_module(told, [], tied=True).vLLMColocateWorkerExtension()
    assert worker.update_weights_from_ipc(torch.ones(3)) == "done"
    assert told == ["layers wait", "kernels []", "layers done config", "head packed"]


def test_an_update_on_a_gpu_is_verls(told):
    told.on_cpu = False
    worker = verls_module(told, ["packed"]).vLLMColocateWorkerExtension()
    assert worker.update_weights_from_ipc(torch.ones(3)) == "done"
    assert told == ["verl's loaders", "kernels ['packed']", "verl processes"]
    assert worker.seen[0][1].tolist() == [0, 0, 0], "no copy"


def test_after_a_failed_update_verl_has_its_functions_again(told):
    module = verls_module(told, [])
    told.fails = True
    with pytest.raises(RuntimeError, match="broken off"):
        module.vLLMColocateWorkerExtension().update_weights_from_ipc(torch.ones(1))
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    del told[:]
    module.patch_vllm_moe_model_weight_loader(None)
    process_weights_after_loading(None)
    assert told == ["verl's loaders", "verl processes"]
