"""Rows of a table by index: the table's own bits, whatever its width, stride, dtype and index."""

from __future__ import annotations

import pytest
import torch

from verl_tim.numerics.contract import ContractError

from .devices import DEVICE

row_lookup = pytest.importorskip("verl_tim.numerics.gpu.row_lookup")


@pytest.mark.parametrize("columns", [1, 24, 1024, 1025, 2500])  # one block, and several of which the last is ragged
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_rows_are_copied(columns, dtype, index_dtype):
    table = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)).to(dtype).to(DEVICE)
    index = torch.tensor([6, 0, 3, 3, 1], dtype=index_dtype, device=DEVICE)
    got = row_lookup.take(table, index)
    assert got.is_contiguous()
    assert got.dtype == dtype
    assert torch.equal(got, table[index.long()])


def test_a_part_of_a_wider_table_and_every_second_index():
    wide = torch.randn(9, 70, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    index = torch.arange(8, device=DEVICE)
    assert torch.equal(row_lookup.take(wide[:, 6:40], index[::2]), wide[::2, 6:40][:4])


def test_values_that_are_no_numbers_are_copied_too():
    table = torch.tensor([[float("nan"), -0.0, float("inf")]], device=DEVICE)
    got = row_lookup.take(table, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert torch.equal(got.view(torch.int32), table.view(torch.int32).expand(2, -1))


def test_no_rows():
    got = row_lookup.take(torch.zeros(3, 5, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert got.shape == (0, 5)


@pytest.mark.parametrize(
    ("table", "index", "message"),
    [
        (torch.zeros(3, 4).t(), torch.zeros(1, dtype=torch.int64), "contiguous rows"),
        (torch.zeros(3), torch.zeros(1, dtype=torch.int64), "contiguous rows"),
        (torch.zeros(3, 4), torch.zeros(1), "vector of integers"),
        (torch.zeros(3, 4), torch.zeros(1, 1, dtype=torch.int64), "vector of integers"),
    ],
)
def test_what_it_cannot_serve_is_refused(table, index, message):
    with pytest.raises(ContractError, match=message):
        row_lookup.take(table.to(DEVICE), index.to(DEVICE))
