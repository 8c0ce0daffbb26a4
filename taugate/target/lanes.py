"""Compute streams for prompts: while one prompt's small kernels leave the GPU half idle, another's run beside them.

A prompt stays in its lane, so its own work is in order, and the numbers do not depend on the number of lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from taugate.target.graphs import Graphs


class Lanes:
    """`count` CUDA streams; on a CPU a single lane without a stream. recorded: elements of the largest state of which
    launches are recorded, 0 for none.
    """

    def __init__(self, device: str, count: int, recorded: int) -> None:
        import torch

        self.count, self.recorded = count, recorded
        self.streams = [torch.cuda.Stream() for _ in range(count)] if device != "cpu" else []
        self._graphs = [Graphs(recorded) for _ in self.streams] if recorded else []

    def serve(self, count: int, recorded: int) -> bool:
        """Whether these would do where others of `count` and `recorded` are wanted; graphs take memory."""
        return count == self.count and (recorded <= self.recorded if recorded else not self.recorded)

    def graphs_of(self, place: int) -> Graphs | None:
        """The graphs of the lane of the prompt at `place`."""
        return self._graphs[place % self.count] if self._graphs else None

    def facts(self) -> dict[str, Any]:
        """How many graphs there are, and why there are no more."""
        refused = [graphs.refused for graphs in self._graphs if graphs.refused]
        return {"recorded": sum(graphs.count for graphs in self._graphs)} | ({"refused": refused[0]} if refused else {})

    @contextmanager
    def of(self, place: int) -> Iterator[None]:
        """Run the body in the lane of the prompt at `place`."""
        import torch

        if not self.streams:
            yield
            return
        with torch.cuda.stream(self.streams[place % len(self.streams)]):
            yield

    def wait(self, event: Any) -> None:
        """Nothing starts in any lane before `event`."""
        for stream in self.streams:
            stream.wait_event(event)

    def events(self) -> list[Any]:
        """Events that have happened once all that was started so far is done."""
        return [stream.record_event() for stream in self.streams]
