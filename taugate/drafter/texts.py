"""Cached texts as tensors: what is known and what is true at the anchors of many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from taugate.drafter.cached import CachedSequence


@dataclass(frozen=True)
class Texts:
    """N sequences. tokens [N, T], padded; last [N]: index of the last token; cap [N]: see CachedSequence."""

    tokens: Tensor
    last: Tensor
    cap: Tensor

    @classmethod
    def of(cls, sequences: Sequence[CachedSequence], device: torch.device) -> Texts:
        ids = [torch.tensor(sequence.token_ids) for sequence in sequences]
        tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        ends = torch.tensor([[sequence.last, sequence.cap] for sequence in sequences]).T
        return cls(tokens.to(device), *ends.to(device))

    def rows(self, keep: Tensor) -> Texts:
        return Texts(self.tokens[keep], self.last[keep], self.cap[keep])

    def known(self, anchors: Tensor) -> Tensor:
        """Tokens at `anchors` [N, A]."""
        return self.tokens.gather(1, anchors)

    def sizes(self, anchors: Tensor, full: int) -> Tensor:
        """Slots [N, A] of the blocks drafted at `anchors` [N, A], see CachedSequence.block_size."""
        return (self.cap[:, None] - anchors).clamp(max=full)

    def truth(self, anchors: Tensor, full: int) -> Tensor:
        """True tokens [N, A, full - 1] of the drafted slots; -1 past the text's end and past a cut block."""
        slots = torch.arange(1, full, device=anchors.device)
        where = anchors[..., None] + slots
        exists = (where <= self.last[:, None, None]) & (slots < self.sizes(anchors, full)[..., None])
        found = self.tokens.gather(1, where.clamp(max=self.tokens.shape[1] - 1).flatten(1)).view_as(where)
        return torch.where(exists, found, -1)
