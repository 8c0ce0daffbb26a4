"""Finished states on their way to the host, so that the next layer need not wait for them.

On a GPU a state is copied to pinned memory on a stream of its own, with the size of its largest element, by which it is
known to be finite; threads of their own move it from there to ordinary memory.
"""

from __future__ import annotations

import queue
import weakref
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from taugate.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SLOTS = 3  # states that may wait for their copy at a time; each holds its GPU memory until then
PINNED = 12  # states that may be in pinned memory at a time; it is taken as it is needed
_MOVERS = 8  # a new state's pages have to be mapped, which takes a thread longer than the copy over the bus


class Outbox:
    """Takes states [1, S, H] from a device and gives them back as bfloat16 on the CPU, [S, H]."""

    def __init__(self, device: str) -> None:
        import torch

        self.cuda = device != "cpu"
        self.stream = torch.cuda.Stream() if self.cuda else None
        self._copies: deque[Any] = deque()  # CUDA events
        self._slots: queue.LifoQueue[_Slot] = queue.LifoQueue()  # those in use first, so that few take memory
        for _ in range(PINNED if self.cuda else 0):
            self._slots.put(_Slot())
        self._pool = ThreadPoolExecutor(_MOVERS, thread_name_prefix="outbox")
        self._states: dict[int, dict[str, Future[Tensor]]] = defaultdict(dict)
        weakref.finalize(self, self._pool.shutdown, wait=False)

    def clear(self) -> None:
        """Forget the states of a pass that was given up."""
        self._states.clear()

    def put(self, index: int, name: str, state: Tensor, slots: int = SLOTS) -> None:
        """Copy a state that the current stream is about to finish; it must not be overwritten afterwards.

        slots: how many states may wait for their copy, this one included.
        """
        import torch

        if self.stream is None:
            done: Future[Tensor] = Future()
            done.set_result(finite(name, state[0].to(torch.bfloat16, copy=True)).contiguous())
            self._states[index][name] = done
            return
        while len(self._copies) >= slots:
            self._copies.popleft().synchronize()
        slot = self._slots.get()
        try:
            self.stream.wait_event(torch.cuda.current_stream().record_event())
            state.record_stream(self.stream)
            with torch.cuda.stream(self.stream):
                self._copies.append(slot.fill(state[0]))
        except BaseException:
            self._slots.put(slot)
            raise
        self._states[index][name] = self._pool.submit(self._move, name, slot)

    def take(self, index: int) -> dict[str, Tensor]:
        """The states of a sequence by name. Raises CheckpointError for one that is not finite."""
        return {name: state.result() for name, state in self._states.pop(index).items()}

    def _move(self, name: str, slot: _Slot) -> Tensor:
        try:
            return slot.emptied(name)
        finally:
            self._slots.put(slot)


class _Slot:
    """Pinned memory for one state and its largest element; it grows to the largest state."""

    def __init__(self) -> None:
        import torch

        self._memory = torch.empty(0, dtype=torch.bfloat16)
        self._peak = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._there: Any = None
        self._state = self._memory

    def fill(self, state: Tensor) -> Any:
        """Begin to copy a state [S, H] on the current stream; the result is a CUDA event after which it is there."""
        import torch

        if self._memory.numel() < state.numel():
            self._memory = torch.empty(state.numel(), dtype=torch.bfloat16, pin_memory=True)
        self._state = self._memory[: state.numel()].view(state.shape)
        rounded = state.to(torch.bfloat16)
        self._state.copy_(rounded, non_blocking=True)
        self._peak.copy_(_peak(rounded).float(), non_blocking=True)
        self._there = torch.cuda.Event(blocking=True)
        self._there.record()
        return self._there

    def emptied(self, name: str) -> Tensor:
        """The state in memory of its own. Raises CheckpointError if it is not finite."""
        import numpy
        import torch

        self._there.synchronize()
        if not self._peak.isfinite():
            raise _not_finite(name, len(self._state))
        # numpy asks for huge pages where a large array may have them: mapping small ones takes longer than the copy,
        # which it makes without threads of its own; torch's would be as many again for each of the movers.
        memory = numpy.empty(self._state.shape, numpy.int16)
        numpy.copyto(memory, self._state.view(torch.int16).numpy())
        return torch.from_numpy(memory).view(torch.bfloat16)


def finite(name: str, state: Tensor) -> Tensor:
    """The state itself. Raises CheckpointError if it holds infinities or NaNs."""
    if not _peak(state).isfinite():
        raise _not_finite(name, len(state))
    return state


def _peak(state: Tensor) -> Tensor:
    """The largest absolute value, NaN if there is one: a reduction that needs no memory."""
    import torch

    return torch.linalg.vector_norm(state, float("inf"))


def _not_finite(name: str, tokens: int) -> CheckpointError:
    return CheckpointError(f"{name} of a sequence of {tokens} tokens is not finite; nothing was kept")
