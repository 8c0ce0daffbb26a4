"""Where prompts are between two layers of the streamed engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from taugate.target.lanes import Lanes


class Waiting:
    """Hidden states [1, S, H] of `count` prompts between two layers; before the first they are embedded.

    where: "gpu", or "host" for pinned memory.
    """

    def __init__(self, embedded: Callable[[int], Tensor], count: int, device: str, where: str) -> None:
        self.device, self.moves = device, device != "cpu" and where == "host"
        self._embedded = embedded
        self.hidden: list[Tensor | None] = [None] * count

    def embed_ahead(self, lanes: Lanes) -> Iterator[None]:
        """Embed the prompts, one at each step; none where they wait on the host.

        It is for the time in which the first layer is on its way; later a prompt's copy stands between the products of
        two others.
        """
        import torch

        for place in range(0 if self.moves else len(self.hidden)):
            with torch.inference_mode(), lanes.of(place):
                self.hidden[place] = self._embedded(place)
            yield

    def take(self, place: int) -> Tensor:
        """The states of the prompt at `place`, on the device in the current stream."""
        hidden = self.hidden[place]
        if hidden is None:
            return self._embedded(place)
        return hidden.to(self.device, non_blocking=True) if self.moves else hidden

    def last(self, place: int) -> Tensor:
        """The same for good: nothing is kept of it."""
        hidden, self.hidden[place] = self.take(place), None
        return hidden

    def put(self, place: int, state: Tensor) -> None:
        """Keep the states that the current stream is about to finish."""
        if not self.moves:
            self.hidden[place] = state
            return
        if self.hidden[place] is None:
            self.hidden[place] = state.new_empty(state.shape, device="cpu", pin_memory=True)
        self.hidden[place].copy_(state, non_blocking=True)
