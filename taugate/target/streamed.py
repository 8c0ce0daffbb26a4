"""The streamed engine: all prompts go through layer L before layer L+1 is there, so a large model needs little GPU.

Two layer buffers take turns: while the prompts go through one, the next layer arrives in the other (`loading`). With
room for a single buffer the ring of pinned memory still reads ahead. Between layers the prompts' hidden states wait on
the GPU, or in pinned host memory where the ceiling leaves no room. On a CPU the same loop runs without streams.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.errors import GpuMemoryError
from taugate.target import memory
from taugate.target.embedding import Embedding
from taugate.target.graphs import OUTPUTS, Graphs
from taugate.target.kernels import enter_layer
from taugate.target.lanes import Lanes
from taugate.target.loading import Loader, Loading, aligned_bytes, views
from taugate.target.outbox import PINNED, SLOTS, Outbox
from taugate.target.pages import on_ram_disk
from taugate.target.progress import LayerDone, SequenceDone
from taugate.target.segments import joined, new_cache, segments
from taugate.target.skeleton import Skeleton, empty, fill, forward_dtypes
from taugate.target.store import FINAL_HIDDEN, tap_name
from taugate.target.waiting import Waiting

if TYPE_CHECKING:
    from torch import Tensor

# Prompts of one pass share the host's memory with their finished states: this part of what is free may go to them, and
# as much to pinned files of the page cache. Those of a RAM disk take nothing.
HOST_SHARE = 0.5
# fla's path records fused launches, while its eager calls run the modules' own forwards, too, for comparison.
RECORDED = {"fla": 0.75}


class Streamed:
    """Layers 0…deepest of a checkpoint, streamed. limit: bytes of GPU memory, context included; None: what is free."""

    def __init__(
        self, directory: Path, path: str, dtype: Any, device: str, taps: list[int], final: bool, limit: int | None
    ) -> None:
        self.skeleton = Skeleton(directory, taps, final, dtype, device)
        self.path, self.taps, self.final, self.device, self.limit = path, taps, final, device, limit
        self.plan: memory.Plan | None = None
        layout = self.skeleton.layout
        self._tensors = [layout.layer_tensors(layer) for layer in range(self.skeleton.depth)]
        self._dtypes = [forward_dtypes(layout, f"layers.{n}.", t, dtype) for n, t in enumerate(self._tensors)]
        self._sizes = [aligned_bytes(t, d) for t, d in zip(self._tensors, self._dtypes, strict=True)]
        self._loader = Loader(device)
        # A product leaves a workspace on its stream, earlier captures on theirs, too; torch keeps them all.
        self._context, self._before = memory.context_bytes() if device != "cpu" else (0, 0)
        stored = Counter[Path]()
        for piece in (piece for layer in self._tensors for tensor in layer.values() for piece in tensor.pieces):
            stored[piece.file] += piece.nbytes
        self._stored, on_ram = stored.total(), sum(n for file, n in stored.items() if on_ram_disk(file))
        self._evictable = self._stored - on_ram
        self._pinned = False
        self._embedding = Embedding(layout.tensors["embed_tokens.weight"], dtype, device)
        self._outbox = Outbox(device)
        self._buffers: list[Tensor] = []
        self._lanes: Lanes | None = None

    def facts(self) -> dict[str, Any]:
        """The plan of memory in MiB, and how many CUDA graphs were recorded."""
        graphs = {"graphs": self._lanes.facts()} if self._lanes and self.plan else {}
        plan = {"plan": self.plan.to_json(), "files": self._loader.facts()} if self.plan else {}
        return {"name": "streamed", **plan, **graphs}

    def states(self, sequences: Sequence[Sequence[int]]) -> Iterator[LayerDone | SequenceDone]:
        """Raises GpuMemoryError before anything is loaded, CheckpointError for a state that is not finite."""
        self._embedding.check(sequences)
        for group in self._groups(sequences):
            yield from self._pass([sequences[index] for index in group], group)

    def _groups(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Sequences of one pass over the model: as many as the host can hold the states of."""
        states = len(self.taps) + self.final + 2
        room = HOST_SHARE * memory.host_bytes() / (states * 2 * self.skeleton.config.hidden_size)
        group: list[int] = []
        for index, ids in enumerate(sequences):
            if group and sum(len(sequences[i]) for i in group) + len(ids) > room:
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    def _plan(self, sequences: Sequence[Sequence[int]]) -> memory.Plan | None:
        """The plan for these sequences, with torch's allocator held to it; None on a CPU."""
        if self.device == "cpu":
            return None
        import torch

        config, itemsize = self.skeleton.config, self.skeleton.dtype.itemsize
        state = config.hidden_size * itemsize
        context = self._context
        free, total = torch.cuda.mem_get_info()
        tables = memory.page_tables(self._stored)
        limit = free + context + torch.cuda.memory_reserved() + (tables if self._pinned else 0)
        reason = "the other processes on the GPU"
        if self.limit is not None and self.limit < limit:
            limit, reason = self.limit, "capture.max_gpu_memory"
        longest = max(len(ids) for ids in sequences)
        piece = max(end - begin for begin, end in segments(longest))
        past = longest - piece if longest > piece else 0
        fits = partial(
            memory.plan_streaming,
            limit,
            context + self._before + memory.arguments_bytes(config, map(len, sequences), itemsize),
            max(self._sizes),
            memory.scratch_bytes(config, piece, itemsize, self.path, past),
            sum(map(len, sequences)) * state,
            # In and out of a layer, their pieces or a graph's fixed place, one to compare, what is in the outbox.
            (5 + SLOTS) * longest * state,
            reason,
            RECORDED.get(self.path, 1.0),
            OUTPUTS * longest * state,
        )
        plan = fits(tables=tables if self._pinned else 0)
        if not self._pinned and self._pinnable():
            plan = self._pin(plan, lambda: fits(tables=tables))
        beside = context + memory.LAZY_KERNELS + plan.tables
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit - beside) / total))
        return plan

    def _pinnable(self) -> bool:
        return self._evictable < HOST_SHARE * memory.host_bytes()

    def _pin(self, plan: memory.Plan, pinned: Callable[[], memory.Plan]) -> memory.Plan:
        """Have the files pinned where that leaves the GPU the memory to work in the same way."""
        with suppress(GpuMemoryError):
            if (found := pinned()).way == plan.way:
                self._pinned = True
                # From the last layer on: a pass that has begun meets what is pinned half way.
                self._loader.pin(reversed(self._tensors))
                return found
        return plan

    def _pass(self, sequences: list[Sequence[int]], indices: list[int]) -> Iterator[LayerDone | SequenceDone]:
        import torch

        self.plan = self._plan(sequences)
        depth, begun = self.skeleton.depth, time.monotonic()
        count = min(self.plan.buffers if self.plan else 2, depth)
        buffers, lanes = self._places(count, list(map(len, sequences)))
        fresh = [torch.cuda.current_stream().record_event()] if lanes.streams else []
        waiting = self._waiting(sequences, lanes)
        under_way = {0: self._start(0, buffers[0], fresh, waiting.embed_ahead(lanes))}
        under_way |= {layer: self._start(layer, buffers[layer], fresh) for layer in range(1, count)}
        self._outbox.clear()
        for layer in range(depth):
            loading, weights = under_way.pop(layer)
            lanes.wait(loading.arrive())
            self._layer(layer, weights, waiting, indices, lanes)
            if layer + count < depth:
                under_way[layer + count] = self._start(layer + count, buffers[layer % count], lanes.events())
            spent = time.monotonic() - begun
            left = spent / (layer + 1) * (depth - layer - 1)
            yield LayerDone(layer, depth, len(sequences), self._sizes[layer], round(left, 1))
        if self.final:
            self._norm(waiting, indices, lanes)
        for index in indices:
            yield SequenceDone(index, self._outbox.take(index))

    def _places(self, count: int, lengths: list[int]) -> tuple[list[Tensor], Lanes]:
        """Layer buffers and lanes. They outlast a pass, since the modules of its last layers are views of them."""
        import torch

        lanes, graphs = (self.plan.lanes, self.plan.graphs) if self.plan else (1, False)
        whole = [length for length in lengths if len(segments(length)) == 1] if graphs else []
        recorded = max(whole, default=0) * self.skeleton.config.hidden_size
        if len(self._buffers) != count or self._lanes is None or not self._lanes.serve(lanes, recorded):
            for module in self.skeleton.layers:
                empty(module)
            self._buffers, self._lanes = [], None
            size = max(self._sizes)
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(count)]
            self._lanes = Lanes(self.device, lanes, recorded)
        return self._buffers, self._lanes

    def _waiting(self, sequences: list[Sequence[int]], lanes: Lanes) -> Waiting:
        """The prompts, and everything that their layers are called with, before the lanes part."""
        import torch

        where = self.plan.waiting if self.plan else "host"
        with torch.inference_mode():
            waiting = Waiting(lambda place: self._embedding(sequences[place]), len(sequences), self.device, where)
            for ids in sequences:
                self._calls(len(ids))
        if lanes.streams:
            lanes.wait(torch.cuda.current_stream().record_event())
        return waiting

    def _start(
        self, layer: int, buffer: Tensor, after: list[Any], meanwhile: Iterator[None] | None = None
    ) -> tuple[Loading, dict[str, Tensor]]:
        weights = views(buffer, self._tensors[layer], self._dtypes[layer])
        return self._loader.start(self._tensors[layer], weights, after, meanwhile), weights

    def _calls(self, length: int) -> list[tuple[int, int, list[dict[str, Any]]]]:
        """(begin, end, arguments of each layer) of the segments of a sequence."""
        pieces = segments(length)
        return [(begin, end, self.skeleton.calls(begin, end, len(pieces) > 1)) for begin, end in pieces]

    def _layer(
        self, layer: int, weights: dict[str, Tensor], waiting: Waiting, indices: list[int], lanes: Lanes
    ) -> None:
        """All waiting prompts through one layer."""
        import torch

        module = self.skeleton.layers[layer]
        fill(module, weights)
        enter_layer(layer)
        for place, index in enumerate(indices):
            with torch.inference_mode(), lanes.of(place):
                out = self._run(layer, module, waiting.take(place), lanes.graphs_of(place))
                if layer in self.taps:
                    self._outbox.put(index, tap_name(layer), out)
                waiting.put(place, out)

    def _run(self, layer: int, module: Any, hidden: Tensor, graphs: Graphs | None) -> Tensor:
        """One prompt [1, S, H] through one layer, by a CUDA graph where there is one for its kind and length."""
        # Experts are chosen on the host, and a cache is a new object each time: neither is a fixed list of launches.
        if graphs is None or self.skeleton.branches or len(segments(hidden.shape[1])) > 1:
            return self._through(layer, module, hidden)
        length = hidden.shape[1]
        given = [id(value) for *_, of_layer in self._calls(length) for value in of_layer[layer].values()]
        shapes = [(key, tensor.shape) for key, tensor in self._tensors[layer].items()]
        key = (length, layer % len(self._buffers), tuple(shapes), tuple(given))
        return graphs.run(key, lambda states: self._through(layer, module, states), hidden)

    def _through(self, layer: int, module: Any, hidden: Tensor) -> Tensor:
        """One prompt [1, S, H] through one layer, segment by segment."""
        calls = self._calls(hidden.shape[1])
        cache = new_cache(self.skeleton.config) if len(calls) > 1 else None
        out = []
        for begin, end, of_layer in calls:
            done = module(hidden[:, begin:end], **self.skeleton.with_cache(of_layer[layer], cache))
            out.append(done[0] if isinstance(done, tuple) else done)
        return joined(out)

    def _norm(self, waiting: Waiting, indices: list[int], lanes: Lanes) -> None:
        """The final norm over every prompt."""
        import torch

        stored = {"weight": self.skeleton.layout.tensors["norm.weight"]}
        weights = {"weight": torch.empty(stored["weight"].shape, dtype=self.skeleton.dtype, device=self.device)}
        lanes.wait(self._loader.start(stored, weights).arrive())
        fill(self.skeleton.norm, weights)
        # Where prompts wait on the GPU each normed one has the memory of one that waited.
        slots = SLOTS if waiting.moves else PINNED
        for place, index in enumerate(indices):
            with torch.inference_mode(), lanes.of(place):
                hidden = waiting.last(place)
                normed = [self.skeleton.norm(hidden[:, begin:end]) for begin, end in segments(hidden.shape[1])]
                self._outbox.put(index, FINAL_HIDDEN, joined(normed), slots)
