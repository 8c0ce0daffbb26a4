"""Rounding as hardware does it, on bit patterns: bfloat16 to nearest even, TF32 by truncation."""

from __future__ import annotations

import numpy as np


def decode(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bit patterns."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode(values: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns of float32 values, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    nan = np.isnan(values)
    return np.where(nan, np.uint16(0x7FC0), rounded.astype(np.uint16)) if nan.any() else rounded.astype(np.uint16)


def truncate_tf32(values: np.ndarray) -> np.ndarray:
    """float32 with the 10 mantissa bits that a TF32 dot reads."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)
