from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.contract import (
    ContractError,
    ceil_to,
    check_process,
    contract_id,
    exact_region,
    operand,
    pad_dim0,
)

from .bits import randn


def test_contract_id_names_what_decides_bits():
    assert contract_id("cpu", torch.bfloat16) == "chunk64/cpu-e/bfloat16/1"
    assert contract_id(torch.device("cpu"), torch.float32) == "chunk64/cpu-e/float32/1"


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", torch.float16, "float16"),
        ("cuda", torch.bfloat16, "'cuda'"),
        ("meta", torch.float32, "rollout=stock trainer=stock"),
    ],
)
def test_contract_id_refuses(device, dtype, message):
    with pytest.raises(ContractError, match=message):
        contract_id(device, dtype)


@pytest.mark.parametrize(("value", "multiple", "want"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (65, 64, 128)])
def test_ceil_to(value, multiple, want):
    assert ceil_to(value, multiple) == want


def test_pad_dim0_appends_zero_rows_only_when_needed():
    x = randn(5, 3)
    padded = pad_dim0(x, 8)
    assert padded.shape == (8, 3)
    assert torch.equal(padded[:5], x)
    assert not padded[5:].any()
    assert pad_dim0(padded, 8) is padded


def test_operand_is_aligned_and_contiguous():
    base = randn(70)
    for view in (base[3:67].view(8, 8), base[:64].view(8, 8).t(), base[:64].view(8, 8).bfloat16()):
        result = operand(view)
        assert result.dtype == torch.float32
        assert result.is_contiguous()
        assert result.data_ptr() % 64 == 0
        assert torch.equal(result, view.float())


def test_exact_region_switches_autocast_off_and_back():
    x = randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with exact_region("cpu"):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


@pytest.fixture
def float32_settings():
    check_process("cpu")
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before
    torch.set_flush_denormal(False)
    check_process("cpu")


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_process_that_allows_other_float32_products_is_refused(float32_settings, precision):
    float32_settings.fp32_precision = precision
    with pytest.raises(ContractError, match=f"may use {precision}"):
        check_process("cpu")


@pytest.mark.usefixtures("float32_settings")
def test_a_process_that_flushes_denormals_is_refused():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    with pytest.raises(ContractError, match="set_flush_denormal"):
        check_process("cpu")
