"""A layer's launches recorded once as a CUDA graph and replayed: seventy small kernels cost the host more than the GPU.

A graph knows addresses, not values. Weights of layers of one kind arrive at the same addresses of the same buffer, and
a prompt's states are copied to and from one fixed place, so one graph serves every layer of the kind and every prompt
of the length. That is not taken on trust: a graph is used alone only after it gave, bit for bit, what the eager call
gives, where it was recorded and once more, in another layer or pass; at the first difference recording is given up.
What a graph replays counts as evidence of the kernel path like the calls that it was recorded from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taugate.target.kernels import Calls, count_again, recorded_calls

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 512  # graphs; each holds some hundred KiB
OUTPUTS = 3  # of the largest state's size that stay in the graphs' memory, so that they are copied once less
_CHECKS = 2  # times that a graph has to equal the eager call


@dataclass
class _Recorded:
    graph: Any
    given: Tensor
    out: Tensor  # the place of what is given, too, where there is no room for another
    calls: Calls
    checked: int = 0


class Graphs:
    """Graphs of one lane, in one memory pool and with one place for states, since no two of them run at a time.

    room: elements of the largest state; a larger one runs eagerly.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._recorded: dict[Hashable, _Recorded] = {}
        self.refused = ""  # why recording was given up; everything runs eagerly then
        self._seen: set[Hashable] = set()
        self._place: Tensor | None = None
        self._left = OUTPUTS * room
        import torch

        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """layer(hidden), by its graph if it has been called twice with this key; a new tensor either way.

        The first call of a key runs eagerly, so that kernels are loaded and workspaces are there.
        """
        import torch

        recorded = self._recorded.get(key)
        more = not self.refused and len(self._recorded) < _MOST and hidden.numel() <= self.room
        if recorded is None and key in self._seen and more:
            recorded = self._record(key, layer, hidden)
        if recorded is None:
            self._seen.add(key)
            return layer(hidden)
        _copy(hidden, recorded.given)
        recorded.graph.replay()
        if recorded.checked < _CHECKS:
            return self._checked(recorded, layer(hidden))
        count_again(recorded.calls)
        return _copy(recorded.out, torch.empty_like(recorded.out))

    def _checked(self, recorded: _Recorded, eager: Tensor) -> Tensor:
        import torch

        if torch.equal(recorded.out, eager):
            recorded.checked += 1
        else:
            self.refused = "a replayed layer differed from the eager call"
            self._recorded.clear()
        return eager

    def _record(self, key: Hashable, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> _Recorded | None:
        """The graph of layer(…), or None where something in it cannot be recorded (a copy to the host, say)."""
        import torch

        if self._place is None:
            self._place = hidden.new_empty(self.room)
        place = self._place[: hidden.numel()].view(hidden.shape)
        graph = torch.cuda.CUDAGraph()
        try:
            with recorded_calls() as calls:
                # Not by torch.cuda.graph, which waits for the whole GPU. thread_local: other threads copy meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    out = layer(place)
                    if out.numel() > self._left or not out.is_contiguous():
                        out = _copy(out, place)
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            return None
        self._left -= out.numel() if out is not place else 0
        self._recorded[key] = _Recorded(graph, place, out, calls)
        return self._recorded[key]

    @property
    def count(self) -> int:
        return len(self._recorded)


def _copy(state: Tensor, to: Tensor) -> Tensor:
    """Copy a state's bits into `to` and return it, by a kernel.

    copy_ would use the GPU's copy engine, which is busy with weights: there a copy of 6 µs waits for 44 µs, and the
    weights wait for it (measured on an H200).
    """
    import torch

    torch.bitwise_or(state.contiguous().view(torch.int16), 0, out=to.view(torch.int16))
    return to
