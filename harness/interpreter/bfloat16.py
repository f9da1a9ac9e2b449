"""Authority on bf16 in the interpreter: kept as uint16, decoded to fp32 to compute, rounded to nearest even after."""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def decode(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bits."""
    wide = np.left_shift(np.ascontiguousarray(bits), 16, dtype=np.uint32, casting="unsafe")
    return wide.view(np.float32).reshape(np.shape(bits))


def encode(values: np.ndarray, toward_zero: bool = False) -> np.ndarray:
    """bf16 bits of fp32 values: nearest even (or truncated), NaN stays NaN, subnormals and infinities right."""
    values = np.asarray(values, dtype=np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> 16 if toward_zero else (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        rounded = np.where(nan, 0x7FFF, rounded)
    return rounded.astype(np.uint16).reshape(values.shape)


def holds_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar.name == "bf16" and handle.data.dtype == np.uint16


def values_of(handle: TensorHandle) -> np.ndarray:
    """What a handle holds, as numbers that numpy can compute with."""
    return decode(handle.data) if holds_bf16(handle) else handle.data


def handle_of(values: np.ndarray) -> TensorHandle:
    return TensorHandle(encode(values), tl.bfloat16)
