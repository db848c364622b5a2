"""The columns of verl's parquet files: prompt, data_source, reward_model.ground_truth and extra_info."""

from __future__ import annotations

import pyarrow as pa


def verl_schema(extra_info: list[tuple[str, pa.DataType]]) -> pa.Schema:
    """What verl 0.9.1 reads (its examples/data_preprocess write these columns), with these fields in `extra_info`."""
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct(extra_info)),
        ]
    )
