"""Finished states on their way to the host: copied by a thread of its own, so that the next layer need not wait."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from taugate.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_PENDING = 2  # states that may wait for their copy on the GPU at a time


class Outbox:
    """Takes states [1, S, H] from a device and gives them back as bfloat16 on the CPU, [S, H]."""

    def __init__(self, device: str) -> None:
        import torch

        self.cuda = device != "cpu"
        self.stream = torch.cuda.Stream() if self.cuda else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._room = threading.Semaphore(_PENDING)
        self._states: dict[int, dict[str, Future[Tensor]]] = defaultdict(dict)

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def put(self, index: int, name: str, state: Tensor) -> None:
        """Copy a state that the current stream is about to finish; it must not be overwritten afterwards."""
        import torch

        ready = torch.cuda.current_stream().record_event() if self.cuda else None
        self._room.acquire()
        self._states[index][name] = self._pool.submit(self._copy, name, state[0], ready)

    def take(self, index: int) -> dict[str, Tensor]:
        """The states of a sequence by name. Raises CheckpointError for one that is not finite."""
        return {name: state.result() for name, state in self._states.pop(index).items()}

    def _copy(self, name: str, state: Tensor, ready: Any) -> Tensor:
        import torch

        try:
            with torch.inference_mode():
                if self.stream is None:
                    return finite(name, state).to(torch.bfloat16, copy=True).contiguous()
                with torch.cuda.stream(self.stream):
                    self.stream.wait_event(ready)
                    return finite(name, state).to(torch.bfloat16).to("cpu").contiguous()
        finally:
            self._room.release()


def finite(name: str, state: Tensor) -> Tensor:
    """The state itself. Raises CheckpointError if it holds infinities or NaNs."""
    import torch

    # A reduction that needs no memory; NaN goes through it.
    if not torch.linalg.vector_norm(state, float("inf")).isfinite():
        raise CheckpointError(f"{name} of a sequence of {len(state)} tokens is not finite; nothing was kept")
    return state
