"""Linears of the models the contract is made for: (outputs, inputs), q/k/v and gate/up fused as in the engine."""

QWEN3_1_7B = {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)}
QWEN3_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
QWEN3_30B_A3B = {"qkv": (5120, 2048), "o": (2048, 4096), "router": (128, 2048)}
HEADS = {"head 2048": (151936, 2048), "head 4096": (151936, 4096)}

LINEARS = {
    **{f"1.7B {name}": shape for name, shape in QWEN3_1_7B.items()},
    **{f"8B {name}": shape for name, shape in QWEN3_8B.items()},
    **{f"30B-A3B {name}": shape for name, shape in QWEN3_30B_A3B.items()},
    **HEADS,
}
