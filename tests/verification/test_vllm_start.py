"""A start of vLLM's engine: output on stderr, the cause of a failure named, no failed engine waited for."""

import json
import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from verl_tim.verification.vllm_start import StartError, cause, raised_in, started

# As vLLM 0.28 writes it, shortened.
OUTPUT = """\
(EngineCore pid=7) ERROR 12-01 13:23:07 [core.py:1346] EngineCore failed to start.
(EngineCore pid=7) ERROR 12-01 13:23:07 [core.py:1346] Traceback (most recent call last):
(EngineCore pid=7) ERROR 12-01 13:23:07 [core.py:1346]   File "v1/engine/core.py", line 1315, in run_engine_core
(EngineCore pid=7) ERROR 12-01 13:23:07 [core.py:1346] ValueError: no memory: 3 of 4 GiB
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "v1/engine/core.py", line 1350, in run_engine_core
(EngineCore pid=7)     raise e
(EngineCore pid=7) ValueError: no memory: 3 of 4 GiB
"""
ENGINE_FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"


def test_a_cause_is_what_the_engine_raised():
    assert raised_in(OUTPUT) == ["ValueError: no memory: 3 of 4 GiB"] * 2
    assert cause(RuntimeError(ENGINE_FAILED), OUTPUT) == "ValueError: no memory: 3 of 4 GiB"


def test_what_is_raised_before_an_engine_is_there_is_the_cause_itself():
    assert cause(ValueError("dtype float8 is unknown"), OUTPUT) == "ValueError: dtype float8 is unknown"


def test_an_engine_that_says_nothing_is_not_made_up():
    assert cause(RuntimeError(ENGINE_FAILED), "").startswith("RuntimeError: Engine core initialization failed")


def failing_engine(text: str, stays: bool) -> None:
    os.write(1, text.encode())
    if stays:
        time.sleep(600)
    os._exit(1)


def fails(stays: bool):
    """A start as vLLM's: waits for the engine's process, and raises once that has ended."""
    process = multiprocessing.get_context("spawn").Process(
        target=failing_engine, args=(OUTPUT, stays), name="EngineCore", daemon=True
    )
    process.start()
    process.join()
    raise RuntimeError(ENGINE_FAILED)


@pytest.mark.parametrize("stays", [False, True])
def test_a_failed_engine_is_a_clear_error(stays, capfd):
    began = time.monotonic()
    with pytest.raises(StartError, match=r"^ValueError: no memory: 3 of 4 GiB$"):
        started(lambda: fails(stays), seconds_to_end=0.5)
    assert time.monotonic() - began < 60
    out, err = capfd.readouterr()
    assert out == ""
    assert "EngineCore failed to start" in err


SCRIPT = """
import json, subprocess, sys
from verl_tim.verification.vllm_start import started

child = started(lambda: subprocess.Popen([sys.executable, "-c", "print('from the engine', flush=True); input()"],
                                         stdin=subprocess.PIPE))
print(json.dumps({"result": 1}))
child.communicate(b"\\n")
"""


def test_stdout_is_for_results_while_the_engine_lives():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {"result": 1}
    assert "from the engine" in done.stderr
