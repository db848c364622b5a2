"""Four repairs of Triton 3.6's interpreter, which would otherwise fail or hide errors (no GPU code is touched).

It truncates float32 to bfloat16 where the device rounds to nearest even; it multiplies the bit patterns of bfloat16
matrices as integers; and with numpy 2.4 it cannot take a loop bound from a tensor, since one-element arrays no longer
turn into Python integers. And whoever imports Triton before TRITON_INTERPRET is set (transformers does) leaves its
standard library (cumsum, softmax, ...) compiled functions, which the interpreter cannot call.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.language import standard
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_convert = interpreter._convert_float
_dot = interpreter.InterpreterBuilder.create_dot
_patch_tensor = interpreter._patch_lang_tensor


def _rounding(data, source, target, mode):
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(data, source, target, mode)
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    quiet_nan = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return np.where(np.isnan(data), quiet_nan, rounded)


def _widened(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def _dot_of_values(self, a, b, accumulator, *precision):
    return _dot(self, _widened(a), _widened(b), accumulator, *precision)


def _with_index(tensor, scope):
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def repair() -> None:
    interpreter._convert_float = _rounding
    interpreter.InterpreterBuilder.create_dot = _dot_of_values
    interpreter._patch_lang_tensor = _with_index
    for name, function in list(vars(standard).items()):
        if isinstance(function, JITFunction):
            interpreted = interpreter.InterpretedFunction(function.fn)
            for module in (standard, tl):
                if getattr(module, name, None) is function:
                    setattr(module, name, interpreted)
