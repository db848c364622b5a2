"""The schedule for machines whose GEMM depends on the number of rows: blocks of one size, chosen by the probe."""

import pytest
import torch

import verl_tim.numerics.probe as probe_module
from verl_tim.numerics import ContractError
from verl_tim.numerics.grouped_linear import dispatch, grouped_matmul
from verl_tim.numerics.linear import matmul_rows, row_blocks, use_row_blocks


@pytest.fixture(autouse=True)
def _restored():
    before = row_blocks()
    use_row_blocks(False)
    yield
    use_row_blocks(before)


@pytest.fixture
def blocks(_restored):
    use_row_blocks(True)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 40, 131])
def test_a_row_does_not_know_its_company(blocks, rows):
    generator = torch.Generator().manual_seed(rows)
    x_TK = torch.randn(rows, 192, generator=generator)
    weight_PK = torch.randn(64, 192, generator=generator)
    y_TP = matmul_rows(x_TK, weight_PK)
    alone = torch.cat([matmul_rows(row[None], weight_PK) for row in x_TK])
    assert torch.equal(y_TP.view(torch.int32), alone.view(torch.int32))
    torch.testing.assert_close(y_TP.double(), x_TK.double() @ weight_PK.double().t(), rtol=1e-4, atol=1e-4)


def test_experts_go_through_the_same_blocks(blocks):
    generator = torch.Generator().manual_seed(0)
    expert_TK = torch.randint(0, 4, (21, 1), generator=generator)
    plan = dispatch(expert_TK, 4)
    x_RK = torch.randn(plan.num_rows, 64, generator=generator)
    weight_EPK = torch.randn(4, 128, 64, generator=generator)
    y_RP = grouped_matmul(x_RK, weight_EPK, plan)
    for expert, (start, stop) in enumerate(zip(plan.starts, plan.starts[1:], strict=False)):
        assert torch.equal(y_RP[start:stop], matmul_rows(x_RK[start:stop], weight_EPK[expert]))


@pytest.mark.parametrize("second", ["holds", "fails"])
def test_the_probe_switches_only_where_it_must(monkeypatch, second, caplog):
    seen = []
    monkeypatch.setattr(probe_module, "_dropped", [])

    def run(device, dtype, shapes, threads):
        seen.append(row_blocks())
        if not row_blocks() or second == "fails":
            raise ContractError(f"attempt {len(seen)}")
        return probe_module.ProbeReport("id", (1,), row_blocks=row_blocks())

    monkeypatch.setattr(probe_module, "_run", run)
    if second == "fails":
        with pytest.raises(ContractError, match="attempt 2") as failed:
            probe_module.probe("cpu", torch.float32, None)
        assert str(failed.value.__cause__) == "attempt 1"
        assert not row_blocks()
        assert probe_module.dropped_schedules() == []
    else:
        assert probe_module.probe("cpu", torch.float32, None).row_blocks
        assert row_blocks()
        assert probe_module.dropped_schedules() == ["linear: one product for all rows"]
        assert "attempt 1: products of 8 rows each take the place" in caplog.text
    assert seen == [False, True]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inputs", [64, 192, 320])
def test_a_row_has_the_bits_of_a_process_without_blocks(blocks, inputs, threads):
    """Few rows at one thread: what an unblocked process that passed its probe computes for each of its rows."""
    generator = torch.Generator().manual_seed(inputs)
    x_TK, weight_PK = torch.randn(40, inputs, generator=generator), torch.randn(128, inputs, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = torch.cat([torch.mm(rows, weight_PK.t()) for rows in x_TK.split(8)])
        torch.set_num_threads(threads)
        together = matmul_rows(x_TK, weight_PK)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together.view(torch.int32), alone.view(torch.int32))
