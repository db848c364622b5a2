"""The numerics contract: what decides bits, per operation, with a slow reference beside each (knows nothing of verl).

Shape suffixes of tensor names: T rows (tokens), D hidden, H heads, F half a head, K inner size or keys, N outputs,
V vocabulary, P padded outputs, E experts, I expert inner size, S or N sequences, Q queries, B batch, R dispatched rows.
"""

from verl_tim.numerics.attention import PackedSequences, paged_attention, varlen_attention
from verl_tim.numerics.contract import (
    CHUNK_KEYS,
    COLUMN_FLOOR,
    KEY_BLOCK,
    ROW_FLOOR,
    VOCAB_TILE,
    ContractError,
    contract_id,
)
from verl_tim.numerics.head import head_logits, log_probs_of, token_log_probs
from verl_tim.numerics.paging import PagedBatch
from verl_tim.numerics.sampling import Sampled, SamplingTensors, sample

__all__ = [
    "CHUNK_KEYS",
    "COLUMN_FLOOR",
    "KEY_BLOCK",
    "ROW_FLOOR",
    "VOCAB_TILE",
    "ContractError",
    "PackedSequences",
    "PagedBatch",
    "Sampled",
    "SamplingTensors",
    "contract_id",
    "head_logits",
    "log_probs_of",
    "paged_attention",
    "sample",
    "token_log_probs",
    "varlen_attention",
]
