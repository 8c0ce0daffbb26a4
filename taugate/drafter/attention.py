"""Attention of drafted blocks over a context and over themselves. Shape letters as in `taugate.drafter.model`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from taugate.drafter.checkpoint import DrafterConfig
from taugate.drafter.context import Context, KeyValue
from taugate.drafter.rope import Turn, rotate


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32, with weight `w` (the target's own norms may use `1 + w`; the drafter's
    never do).
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class Look:
    """What some blocks look at, in layers of one kind: context indices first…stop - 1, and of those and of the blocks'
    own tokens what `mask` [N, 1, group · T, T + stop - first] (0 or -inf) lets through.

    tokens: which T of the A · B tokens of a sequence's blocks these are.
    """

    tokens: slice
    first: int
    stop: int
    mask: Tensor


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.index, self.dim, self.groups = index, dim, config.num_heads // config.num_kv_heads

    def key_value(self, x: Tensor, turn: Turn) -> KeyValue:
        """Keys (normed, rotated) and values, each [N, T, kv heads, D], of `x` [N, T, H]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.dim)))
        return rotate(key, turn), self.v_proj(x).unflatten(-1, (-1, self.dim))

    def forward(self, x: Tensor, turn: Turn, context: Context, looks: list[Look]) -> Tensor:
        """Attention of the tokens `x` [N, A · B, H] of all blocks over the context and over their own block."""
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), turn)
        # The heads that share keys are more queries of one head: no key is copied, whatever computes the attention.
        query = query.unflatten(2, (-1, self.groups)).permute(0, 2, 3, 1, 4)
        own_key, own_value = self.key_value(x, turn)
        parts = []
        for look in looks:
            own = own_key[:, look.tokens], own_value[:, look.tokens]
            key, value = context.place(self.index, *own, look.first, look.stop)
            out = functional.scaled_dot_product_attention(
                query[:, :, :, look.tokens].flatten(2, 3),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=look.mask,
                scale=self.dim**-0.5,
            )
            parts.append(out.unflatten(2, (self.groups, -1)))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 3)
        return self.o_proj(out.permute(0, 3, 1, 2, 4).flatten(2))


def visible(
    context: Context,
    first: int,
    stop: int,
    anchors: Tensor,
    sizes: Tensor,
    block: int,
    causal: bool,
    window: int | None,
) -> Tensor:
    """What each token of the blocks sees, bool [N, A · B, A · B + stop - first]: of the blocks' tokens, then of context
    indices first…stop - 1. A window counts the token itself.
    """
    count, slots = anchors.shape[1], torch.arange(block, device=anchors.device)
    position = torch.arange(first, stop, device=anchors.device) - context.start[:, None, None]
    # Strictly before the anchor: its own state is what the target has not computed yet.
    far = ((position >= 0) & (position < anchors[..., None]))[:, :, None].expand(-1, -1, block, -1)
    apart = slots[:, None] - slots
    near = apart >= 0 if causal else torch.ones_like(apart, dtype=torch.bool)
    if window is not None:
        distance = (anchors[..., None] + slots)[..., None] - position[:, :, None]
        far, near = far & (distance < window), near & (apart.abs() < window)
    # A slot past the end of a cut block is no key for the others; it still sees itself, so that its (unused) row stays
    # finite.
    near = (near & (slots < sizes[..., None, None])) | (apart == 0)
    own = torch.eye(count, dtype=torch.bool, device=anchors.device)
    near = near[:, :, :, None] & own[:, None, :, None]
    return torch.cat([near.flatten(3).flatten(1, 2), far.flatten(1, 2)], -1)


def kernels(cuda: bool) -> AbstractContextManager[Any]:
    """On a GPU, attention kernels that need no preparation per shape: shapes change with every step of a replay."""
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if cuda else nullcontext()
