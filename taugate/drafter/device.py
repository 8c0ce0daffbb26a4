"""Keeping a GPU busy while the host looks at what it has already computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Fetched:
    """Tensors on their way to the host: the copy is queued at once, and waited for only when it is looked at."""

    def __init__(self, **tensors: Tensor) -> None:
        some = next(iter(tensors.values()))
        self._copies = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        self._event = torch.cuda.Event() if some.is_cuda else None
        if self._event:
            self._event.record()

    def __getitem__(self, name: str) -> Any:
        """A numpy array."""
        if self._event:
            self._event.synchronize()
        return self._copies[name].numpy()

    def beside(self, work: Callable[[], Tensor]) -> Any:
        """Run `work` on what had been computed when the copies were queued, beside what has been queued since; its
        result as a numpy array.
        """
        if not self._event:
            return work().numpy()
        with torch.cuda.stream(_side(torch.cuda.current_device())):
            torch.cuda.current_stream().wait_event(self._event)
            return work().cpu().numpy()


_SIDE: dict[int, Any] = {}


def _side(device: int) -> Any:
    if device not in _SIDE:
        _SIDE[device] = torch.cuda.Stream(device, priority=-1)
    return _SIDE[device]
