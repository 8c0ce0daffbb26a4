"""Rotary embedding of a drafter: plain 1-D over the whole head, with the drafter's own base and scaling.

The target may rotate only part of a head, or in several dimensions; its drafter does neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from taugate.drafter.config import DrafterConfig

Turn = tuple[Tensor, Tensor]


class Rope:
    """Cosine and sine per position. Scaled variants are computed by transformers, which defines them."""

    def __init__(self, config: DrafterConfig) -> None:
        with torch.device("cpu"):  # also while a model is built on the meta device
            self._frequency, self._scale = _frequencies(config)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """(cos, sin), each [..., T, D/2], for absolute `positions` [..., T]; computed in fp32."""
        if self._frequency.device != positions.device:
            self._frequency = self._frequency.to(positions.device)
        angle = positions[..., None].float() * self._frequency
        return (angle.cos() * self._scale).to(dtype), (angle.sin() * self._scale).to(dtype)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Rotary embedding (Su et al. 2021, half-split layout) of `x` [..., T, D]."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    kind, half = config.rope.get("rope_type", "default"), config.head_dim // 2
    if kind == "default":
        return config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings or 32768,
        rope_parameters=dict(config.rope),
    )
    return ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
