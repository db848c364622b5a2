"""Keys of the prefix cache: what a full KV page holds, as a hash chain.

A page's KV depends on its own tokens, on all tokens before them and on the weights; so does its key:
``key_i = blake2b(key_{i-1} + tokens_i)`` with ``key_{-1}`` standing for the weight version. Nothing else enters KV
under the contract (no batch, no chunk border), so a hit gives the bits that recomputing would give.
"""

from __future__ import annotations

import hashlib

import numpy as np

_DIGEST = 16


def root_key(weight_version: int) -> bytes:
    return hashlib.blake2b(f"weights/{weight_version}".encode(), digest_size=_DIGEST).digest()


def extend_keys(keys: list[bytes], root: bytes, token_L: np.ndarray, page_size: int, num_pages: int) -> None:
    """Append to ``keys`` those of the pages ``len(keys)..num_pages - 1`` of the sequence ``token_L`` (int32)."""
    assert token_L.dtype == np.int32
    assert num_pages * page_size <= len(token_L)
    key = keys[-1] if keys else root
    for page in range(len(keys), num_pages):
        tokens = np.ascontiguousarray(token_L[page * page_size : (page + 1) * page_size])
        key = hashlib.blake2b(key + tokens.tobytes(), digest_size=_DIGEST).digest()
        keys.append(key)
