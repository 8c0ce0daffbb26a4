"""The parts that DFlash 2 adds to a drafter, after `dflash/model.py` of the public implementation (z-lab,
MIT).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from taugate.drafter.config import Dflash2


class GroupedConv(nn.Module):
    """Causal convolution along a block whose kernel is a learned base per channel plus one per group from
    the input.
    """

    def __init__(self, hidden: int, parts: Dflash2) -> None:
        super().__init__()
        self.size, self.group = parts.conv_kernel_size, parts.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.size, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * self.size * (hidden // self.group), bias=False)

    def kernels(self, x: Tensor) -> Tensor:
        """Kernels [2, K, …, B, H/G] of block slots `x` [..., B, H]: of the convolution before and after the
        sublayer.
        """
        out = self.kernel_projection(x).unflatten(-1, (2, self.size, x.shape[-1] // self.group))
        return out.movedim((-3, -2), (0, 1))

    def convolve(self, x: Tensor, kernels: Tensor, which: int) -> Tensor:
        """`x` [..., B, H] convolved along B with kernels[which]; slot b sees slots b, b-1, … of its own
        block.
        """
        blocks = x.unflatten(-1, (-1, self.group))
        out = torch.zeros_like(blocks)
        for offset in range(self.size):
            past = blocks if offset == 0 else functional.pad(blocks[..., :-offset, :, :], (0, 0, 0, 0, offset, 0))
            base = self.base_kernel[which, offset].view(-1, self.group).to(x.dtype)
            out = out + (base + kernels[which, offset][..., None]) * past
        return out.flatten(-2)


class CandidateSelector(nn.Module):
    """Chooses each slot's token among its best by how well it follows the token chosen before it."""

    def __init__(self, hidden: int, vocabulary: int, parts: Dflash2) -> None:
        super().__init__()
        self.top_k = parts.selector_top_k
        shape = (vocabulary, parts.selector_rank)  # tables of zeros: random ones would be drawn only to be overwritten
        self.predecessor_codebook = nn.Embedding(*shape, _weight=torch.zeros(shape))
        self.successor_codebook = nn.Embedding(*shape, _weight=torch.zeros(shape))
        self.hidden_projection = nn.Linear(hidden, parts.selector_rank, bias=False)

    def forward(self, hidden: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """Tokens [R, L] for `hidden` [R, L, H] and `logits` [R, L, V] after the known tokens `anchors`
        [R].
        """
        unary, candidates = logits.topk(self.top_k, dim=-1, sorted=False)
        hidden, before, path = self.hidden_projection(hidden), anchors, []
        for slot in range(hidden.shape[1]):
            context = self.predecessor_codebook(before) * hidden[:, slot]
            follows = torch.einsum("rc,rkc->rk", context, self.successor_codebook(candidates[:, slot]))
            choice = (unary[:, slot] + follows).argmax(-1, keepdim=True)
            before = candidates[:, slot].gather(-1, choice)[:, 0]
            path.append(before)
        return torch.stack(path, dim=1)
