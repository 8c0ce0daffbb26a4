"""Embedded prompts: rows of the stored table, read where they lie; the table never goes to the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from taugate.errors import CheckpointError
from taugate.target.loading import row_matrix, torch_dtype
from taugate.target.shards import Stored

if TYPE_CHECKING:
    from torch import Tensor

_SLOTS = 2  # one is filled while the other is on its way


class Embedding:
    """The table [V, H] of a checkpoint; dtype: of the forward."""

    def __init__(self, table: Stored, dtype: Any, device: str) -> None:
        import torch

        self.table, self.dtype, self.device = table, dtype, device
        self._matrix = row_matrix(table)
        count = _SLOTS if device != "cpu" else 0
        self._slots: list[tuple[Tensor, Any]] = [
            (torch.empty(0, dtype=torch.uint8), torch.cuda.Event()) for _ in range(count)
        ]
        self._turn = 0

    def check(self, sequences: Iterable[Sequence[int]]) -> None:
        """Raises CheckpointError for a token that is not in the table."""
        count = self.table.shape[0]
        for ids in sequences:
            for token in (min(ids), max(ids)) if len(ids) else ():
                if not 0 <= token < count:
                    raise CheckpointError(f"token {token} is outside the target's vocabulary of {count}")

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """[1, S, H] on the device, copied in the current stream."""
        import torch

        rows, width = torch.tensor(ids, dtype=torch.long), self._matrix.shape[1]
        if not self._slots:
            return self._typed(self._matrix.index_select(0, rows)).to(self.dtype)
        self._turn = (self._turn + 1) % _SLOTS
        memory, copied = self._slots[self._turn]
        copied.synchronize()
        if memory.numel() < len(ids) * width:
            memory = torch.empty(len(ids) * width, dtype=torch.uint8, pin_memory=True)
            self._slots[self._turn] = memory, copied
        part = memory[: len(ids) * width].view(len(ids), width)
        torch.index_select(self._matrix, 0, rows, out=part)
        there = self._typed(part).to(self.device, non_blocking=True).to(self.dtype)
        copied.record()
        return there

    def _typed(self, rows: Tensor) -> Tensor:
        return rows.view(torch_dtype(self.table.dtype))[None]
