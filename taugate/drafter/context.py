"""Keys and values of a batch of contexts, one buffer per layer, with room in front for the blocks drafted over them.

A block's keys and values are written right before the first context position that is looked at, so that attention reads
one piece of memory and the context is never copied. What they overwrite lies before the window of every later anchor:
anchors may only grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]


@dataclass
class Context:
    """Contexts of N sequences.

    layers: keys and values [N, room + S, kv heads, D] of each layer. room: tokens that blocks may take in front.
    start [N]: index, behind the room, of each sequence's position 0. Sequences may be shifted so that those that differ
    in length are read at neighbouring indices; what lies around one is padding that no anchor sees.
    """

    layers: list[KeyValue]
    room: int
    start: Tensor
    _used: dict[int, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Context indices, S."""
        return self.layers[0][0].shape[1] - self.room

    def place(self, layer: int, key: Tensor, value: Tensor, first: int, stop: int) -> KeyValue:
        """Write the blocks' keys and values [N, T, kv heads, D] before index `first`; returns theirs and the context's
        up to `stop`, together [N, T + stop - first, kv heads, D].

        Raises ValueError for more than `room` tokens, and where an earlier call has overwritten what this one looks at.
        """
        tokens = key.shape[1]
        if tokens > self.room or first < self._used.get(layer, 0):
            raise ValueError(
                f"blocks of {tokens} tokens over the context from {first} on: there is room for {self.room}, and what "
                f"lies before {self._used.get(layer, 0)} has been overwritten"
            )
        self._used[layer] = first
        begin = self.room + first - tokens
        views = tuple(buffer[:, begin : self.room + stop] for buffer in self.layers[layer])
        for view, new in zip(views, (key, value), strict=True):
            view[:, :tokens] = new
        return views[0], views[1]

    def rows(self, keep: Tensor) -> Context:
        """The contexts `keep` [M] of the N, copied."""
        layers = [(key[keep], value[keep]) for key, value in self.layers]
        return Context(layers, self.room, self.start[keep], dict(self._used))

    @classmethod
    def together(cls, parts: Sequence[Context], shifts: Sequence[int]) -> Context:
        """One batch of contexts of one sequence each, which are emptied; index `shifts[n]` is position 0 of one."""
        room = parts[0].room
        length = max(shift + part.length for shift, part in zip(shifts, parts, strict=True))
        layers = []
        for index in range(len(parts[0].layers)):
            pair = []
            for which in (0, 1):
                sample = parts[0].layers[index][which]
                # Padding is masked, but masked numbers must be numbers.
                buffer = sample.new_zeros(len(parts), room + length, *sample.shape[2:])
                for row, (part, shift) in enumerate(zip(parts, shifts, strict=True)):
                    own = part.layers[index][which][0, room:]
                    buffer[row, room + shift : room + shift + len(own)] = own
                pair.append(buffer)
            for part in parts:
                part.layers[index] = (sample.new_empty(0), sample.new_empty(0))
            layers.append((pair[0], pair[1]))
        return cls(layers, room, torch.tensor(shifts, device=layers[0][0].device))
