"""The contract's schedules for GPUs: Triton kernels and cuBLAS without split-K, one file per operation.

`numerics.contract.kernels` imports one when a GPU tensor first needs it. `chunk64` and `fa3` are the attention
contracts, with one interface (paged, varlen, backward); `attention` and `attention_*` are the schedules of chunk64.
"""
