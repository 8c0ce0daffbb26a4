"""Sizes of the two pairs."""

from __future__ import annotations

from dataclasses import dataclass

END, MASK = "<|endoftext|>", "<|mask|>"
BLOCK, GAMMA = 8, 4.0


@dataclass(frozen=True)
class Shape:
    """Sizes of one pair. taps: target layers that the drafter reads; two query heads share a key head."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    taps: tuple[int, ...]
    head_dim: int
    draft_layers: int


HYBRID = Shape(4096, 256, 640, 8, (0, 2, 4, 5, 6), 64, 3)
FULL = Shape(2048, 128, 320, 10, (1, 3, 5, 7, 8), 32, 2)
