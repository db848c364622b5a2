"""A rehearsal launches what the probe launches; its kernels are found at the launch, and are what one thread makes."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import _async_compile
from triton.runtime import build as triton_build
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from verl_tim.numerics.contract import deciding_device, interpreted_schedules, meta_stands_for, on_gpu
from verl_tim.numerics.gpu import gemm, grouped_gemm, probe, rehearsal
from verl_tim.numerics.probe import ProbeReport

from .test_probe import SHAPES, IntegerProbe, integers

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")

RUN = ("_route", "_count", "_lay_out")  # what is launched depends on their results; the others would take minutes


class Launched(IntegerProbe):
    """The probe's launches on tensors with values. What they compute is for other tests."""

    def expect(self, op, got, want, where):
        pass

    def keep_or_forbid(self, op, schedule, got, want, where, forbid):
        pass


@functools.cache
def _binder(kernel):
    function = JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(function.signature, function.params, backend)


@pytest.fixture
def launches(monkeypatch):
    """What each launch would be compiled for: kernel, types and specialised values of its arguments, options."""
    seen = set()
    run = InterpretedFunction.run

    def noted(self, *args, grid, warmup, **options):
        _, specialisation, rest = _binder(self)(*args, **options)
        seen.add((f"{self.fn.__module__}.{self.__name__}", str(specialisation), str(rest)))
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if self.__name__ in RUN and not any(x.is_meta for x in tensors):
            run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    empty = torch.empty  # what kernels that do not run leave
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).zero_())
    return seen


OTHERS = {
    "experts": SHAPES,
    "ranks": dataclasses.replace(SHAPES, ranks=2, vocab_size=300),
    "dense": dataclasses.replace(SHAPES, moe=None, vocab_size=130),
    "bias": dataclasses.replace(SHAPES, moe=None, biased=SHAPES.linears, page_size=16),
}


@interpreted
@pytest.mark.parametrize("shapes", OTHERS.values(), ids=OTHERS)
def test_launches_what_the_probe_launches(shapes, launches, monkeypatch):
    for name, value in (("ROW_COUNTS", (1, 9, 17)), ("EXPERT_ROW_COUNTS", (1, 8)), ("_ROWS", 40)):
        monkeypatch.setattr(probe, name, value)
    monkeypatch.setattr(gemm, "_chosen", {})
    with interpreted_schedules():
        with meta_stands_for(torch.device("cpu")):
            probe.Rehearsal(rehearsal.META, shapes, "chunk64", ProbeReport("chunk64", ())).run()
        rehearsed = set(launches)
        launches.clear()
        monkeypatch.setattr(probe, "cancelling", integers)
        report = ProbeReport("chunk64", ())
        Launched(torch.device("cpu"), shapes, "chunk64", report).run()
    assert list(report.check_seconds) == ["linears", "row_ops", "attention", "experts", "head", "cuts"]
    assert launches - rehearsed == set(), "compiled at their launch"
    assert rehearsed - launches == set(), "compiled for nothing"
    assert len({name for name, _, _ in launches}) >= (15 if shapes.moe else 11)


def test_meta_stands_for_a_device_only_within():
    x = torch.empty(1, device="meta")
    assert not on_gpu(x)
    with meta_stands_for(torch.device("cuda", 1)):
        assert on_gpu(x)
        assert deciding_device(x) == torch.device("cuda", 1)
        assert deciding_device(torch.empty(1)) == torch.device("cpu")
        other = []
        thread = threading.Thread(target=lambda: other.append(on_gpu(x)))
        thread.start()
        thread.join()
        assert other == [False]
    assert not on_gpu(x)


def test_compilations_run_side_by_side_and_keep_their_errors(monkeypatch):
    monkeypatch.setattr(rehearsal, "threads", lambda: 2)
    noted, together = rehearsal._Noted(), threading.Barrier(2, timeout=20)
    futures = [noted.submit(together.wait) for _ in range(2)]
    futures.append(noted.submit(int, "no number"))
    assert not any(future.done() for future in futures)
    noted.compile("test")
    assert {future.result(0) for future in futures[:2]} == {0, 1}
    with pytest.raises(ValueError, match="no number"):
        futures[2].result(0)


def test_one_launcher_of_a_signature_is_made_at_a_time(monkeypatch):
    making, most = [], []

    def launcher_cls(source, metadata):
        making.append(str(source.signature))
        most.append((making.count(str(source.signature)), len(set(making))))
        time.sleep(0.05)
        making.remove(str(source.signature))

    monkeypatch.setattr(rehearsal.driver, "_active", SimpleNamespace(launcher_cls=launcher_cls))
    launchers = rehearsal._Launchers()
    kernels = [
        SimpleNamespace(src=SimpleNamespace(signature={"x": kind}), metadata=SimpleNamespace())
        for kind in ("*bf16", "*fp32") * 4
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(launchers.make, kernels))
    assert max(of_one for of_one, _ in most) == 1
    assert max(kinds for _, kinds in most) == 2


@pytest.mark.parametrize("error", [AttributeError("another Triton"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("during", ["work", "compile"])
def test_a_rehearsal_that_is_cut_off_ends(monkeypatch, error, during):
    """Triton waits for all that was noted, of which nobody compiles anything any more."""
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(rehearsal.driver, "_active", SimpleNamespace())
    raised = []

    def cut_off(*args):
        raise error

    def work():
        mode = _async_compile.active_mode.get()
        for key in ("one", "two"):
            mode.submit(key, lambda: None, lambda kernel: None)
        if during == "work":
            cut_off()

    def run():
        try:
            rehearsal.rehearse(torch.device("cuda", 0), work)
        except BaseException as found:
            raised.append(found)

    if during == "compile":
        monkeypatch.setattr(rehearsal._Noted, "compile", cut_off)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(3)
    assert raised == [error]


def _run(module, *arguments, cache):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.numerics.gpu.{module}", *arguments],
        capture_output=True, text=True, env=environment | {"TRITON_CACHE_DIR": str(cache)}, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_are_found_at_the_launch_and_errors_are_raised(tmp_path):
    (seen,) = _run("rehearse_small", cache=tmp_path)
    assert seen["ready"] == 2
    assert seen["again"] == 0
    assert seen["launchers"] == ["_copy", "_copy"], "the first launch would wait for the C compiler"
    assert seen["compiled_at_launch"] == 0
    assert seen["warm_ups"] == [True] * 3 + [False] * 3
    assert "_broken" in seen["error"] or "tl.arange(0, 2 * BLOCK)" in seen["error"]
    assert (seen["left_active"], seen["put_back"], seen["ready_after_error"]) == (False, True, 0)


@pytest.mark.slow
def test_threads_make_the_code_of_one_thread(tmp_path):
    one, four = (_run("rehearse_all", count, cache=tmp_path / count) for count in ("1", "4"))
    assert len(one) > 40
    assert {"attention_hopper._prefill", "grouped_gemm._stream"} < {kernel["kernel"] for kernel in one}
    assert sorted(map(json.dumps, one)) == sorted(map(json.dumps, four))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("name", "least"), [("qwen3-1.7b", 450), ("qwen3-30b-a3b", 310)])
def test_the_probe_of_a_gpu_compiles_nothing_more(name, least, ranks, monkeypatch):
    from verl_tim.models import config_from_hf
    from verl_tim.tasks.random_model import hf_config

    late, check, build = [], probe.GpuProbe.run, triton_build._build

    def built(name, *rest):
        late.append(f"C compiler: {name}")
        return build(name, *rest)

    def watched(self):
        if type(self) is not probe.GpuProbe:
            return check(self)
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, repr, **_: late.append(repr))
        monkeypatch.setattr(triton_build, "_build", built)
        return check(self)

    monkeypatch.setattr(probe.GpuProbe, "run", watched)
    monkeypatch.setattr(grouped_gemm, "_forbidden", set())
    monkeypatch.setattr(gemm, "_forbidden", set())
    report = ProbeReport("chunk64", ())
    shapes = dataclasses.replace(config_from_hf(hf_config(name)).probe_shapes, ranks=ranks)
    probe.run(torch.device("cuda", torch.cuda.current_device()), shapes, "chunk64", report)
    assert late == []
    assert not report.forbidden
    assert sum(report.comparisons.values()) >= least


def test_a_rehearsal_that_fails_costs_time_and_is_told(monkeypatch, caplog):
    checked = []

    def broken(device, work, **options):
        raise AttributeError("another Triton")

    monkeypatch.setattr(probe, "rehearse", broken)
    monkeypatch.setattr(probe.GpuProbe, "run", lambda self: checked.append(self.device))
    report = ProbeReport("chunk64", ())
    probe.run(
        torch.device("cpu"), next(iter(SHAPES.values())) if isinstance(SHAPES, dict) else SHAPES, "chunk64", report
    )
    assert checked == [torch.device("cpu")]
    assert report.kernels == 0
    assert "one after another" in caplog.text
    assert "another Triton" in caplog.text


def test_what_the_device_does_not_do_is_raised(monkeypatch):
    def broken(device, shapes):
        raise RuntimeError("no such device")

    monkeypatch.setattr(probe, "_set_up", broken)
    monkeypatch.setattr(probe, "rehearse", lambda *args, **options: 0)
    monkeypatch.setattr(probe.GpuProbe, "run", lambda self: pytest.fail("checked"))
    with pytest.raises(RuntimeError, match="no such device"):
        probe.run(torch.device("cpu"), SHAPES, "chunk64", ProbeReport("chunk64", ()))
