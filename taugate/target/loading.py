"""Weights from files to a device: mapped files, a small ring of pinned host memory, one CUDA stream for the copies.

One thread takes the chunks of all tensors in their order. What is pinned (`pages`) the GPU reads from the file itself.
Any other chunk is copied from the file's pages into the next slot of the ring by all of torch's threads at once, and
from there to the device while the next one is copied; the ring is smaller than a processor's cache, so that main memory
is read but hardly written. So reading, copying and computing overlap, pinned memory does not grow with the model, and
the thread that launches the layers does not contend for the interpreter with a dozen readers. On a CPU the same thread
fills the destination.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.errors import CheckpointError
from taugate.target.pages import PIECE, MappedFile
from taugate.target.shards import Stored

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 16 << 20
SLOTS = 6  # of the ring, for a GPU; one is enough for a CPU, whose copies are over when they return
_STEP = 3  # chunks that are queued before something else has its turn
_PINNERS = 4
ALIGNMENT = 512  # of a tensor in a layer's buffer, as the CUDA allocator aligns: libraries choose kernels by alignment
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def aligned_bytes(tensors: Mapping[str, Stored], dtypes: Mapping[str, Any]) -> int:
    """Bytes of a buffer that holds these tensors in these torch dtypes."""
    return sum(_padded(_elements(t) * dtypes[key].itemsize) for key, t in tensors.items())


def views(buffer: Tensor, tensors: Mapping[str, Stored], dtypes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of their shapes and dtypes, one after the other in a flat uint8 buffer."""
    found, offset = {}, 0
    for key, stored in tensors.items():
        size = _elements(stored) * dtypes[key].itemsize
        found[key] = buffer[offset : offset + size].view(dtypes[key]).view(stored.shape)
        offset += _padded(size)
    return found


_Part = tuple[Path, int, int, str, "Tensor"]  # file, offset, bytes, dtype, destination


@dataclass(frozen=True)
class Loading:
    """Copies that are under way."""

    queued: Future[None]
    stream: Any

    def arrive(self) -> Any:
        """Return when all copies are queued; the result is a CUDA event after which the data is there (CPU: None).

        Raises CheckpointError when a file could not be read.
        """
        self.queued.result()
        return self.stream.record_event() if self.stream is not None else None


class Loader:
    """Reads stored tensors into tensors of one device ("cpu" or "cuda"). Pinned memory and files last as long as it.

    threads: that copy a chunk into the ring; on a CPU torch's own number is left as it is.
    """

    def __init__(self, device: str, threads: int | None = None) -> None:
        import torch

        self.cuda = device != "cpu"
        self.threads = threads or min(16, max(1, len(os.sched_getaffinity(0)) - 1))
        self.stream = torch.cuda.Stream() if self.cuda else None
        several = {"initializer": torch.set_num_threads, "initargs": (self.threads,)} if self.cuda else {}
        self._copier = ThreadPoolExecutor(1, "loader", **several)
        self._adviser = ThreadPoolExecutor(1, "readahead")
        self._pinners = ThreadPoolExecutor(_PINNERS, "pin")
        self._refused = ""
        self._files: dict[Path, MappedFile] = {}
        self._opening = threading.Lock()
        slots = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(SLOTS if self.cuda else 1)]
        copied = [torch.cuda.Event(blocking=True) if self.cuda else None for _ in slots]
        self._ring = itertools.cycle(zip(slots, copied, strict=True))
        weakref.finalize(self, _close, (self._copier, self._adviser, self._pinners), self._files)

    def start(
        self, tensors: Mapping[str, Stored], destinations: Mapping[str, Tensor], after: Any = (),
        meanwhile: Iterator[object] | None = None,
    ) -> Loading:  # fmt: skip
        """Begin to fill `destinations` (contiguous, by the same keys), converting where dtypes differ.

        after: CUDA events that have to have happened before the destinations may be overwritten. What was started
        before is copied before. meanwhile: steps with copies of their own, taken between those of the chunks as long as
        there are some; for the GPU serves copies in the order in which they were queued, whatever their streams.
        """
        parts = []
        for key, stored in tensors.items():
            flat, begin = destinations[key].view(-1), 0
            for file, offset, count in _chunks(stored):
                elements = count // _itemsize(stored)
                parts.append((file, offset, count, stored.dtype, flat[begin : begin + elements]))
                begin += elements
        self._adviser.submit(self._read_ahead, parts)
        return Loading(self._copier.submit(self._copy, parts, after, meanwhile), self.stream)

    def _copy(self, parts: list[_Part], after: Any, meanwhile: Iterator[object] | None) -> None:
        import torch

        with torch.inference_mode(), torch.cuda.stream(self.stream) if self.cuda else nullcontext():
            for event in after:
                self.stream.wait_event(event)
            for number, (file, offset, count, dtype, destination) in enumerate(parts, 1):
                if meanwhile is not None and number % _STEP == 0:
                    next(meanwhile, None)
                mapped, kind = self._open(file), torch_dtype(dtype)
                if mapped.pinned(offset, count) and kind == destination.dtype and offset % kind.itemsize == 0:
                    destination.copy_(mapped.bytes(offset, count).view(kind), non_blocking=True)
                    continue
                slot, copied = next(self._ring)
                if copied is not None:
                    copied.synchronize()
                slot[:count].copy_(mapped.bytes(offset, count))
                destination.copy_(slot[:count].view(kind), non_blocking=True)
                if copied is not None:
                    copied.record()

    def pin(self, layers: Iterable[Mapping[str, Stored]]) -> None:
        """Begin to pin the files of these tensors in the background, in this order; stops where CUDA refuses."""
        every = (stored for tensors in layers for stored in tensors.values())
        pieces = dict.fromkeys((file, offset // PIECE) for stored in every for file, offset, _ in _chunks(stored))
        for file, piece in pieces:
            self._pinners.submit(self._pin, file, piece)

    def facts(self) -> dict[str, Any]:
        """MiB of files that are pinned by now, and why there are no more."""
        pinned = sum(file.pinned_bytes for file in list(self._files.values()))
        return {"pinned": pinned >> 20} | ({"unpinned": self._refused} if self._refused else {})

    def _pin(self, file: Path, piece: int) -> None:
        if not self._refused and (reason := self._open(file).pin(piece)):
            self._refused = reason

    def _read_ahead(self, parts: list[_Part]) -> None:
        for file, offset, count, *_ in parts:
            self._open(file).read_ahead(offset, count)

    def _open(self, file: Path) -> MappedFile:
        with self._opening:
            if file not in self._files:
                self._files[file] = MappedFile(file)
            return self._files[file]


def _close(pools: tuple[ThreadPoolExecutor, ...], files: dict[Path, MappedFile]) -> None:
    # A task holds its loader, so none is left; this may well run in the thread of the last one, which cannot be joined.
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
    for file in files.values():
        file.close()


def row_matrix(stored: Stored) -> Tensor:
    """A stored matrix [V, H] as bytes [V, bytes of a row], mapped from its file: only what is used of it is read."""
    import torch

    (piece,), count = stored.pieces, stored.shape[0]
    mapped = torch.from_file(str(piece.file), shared=False, size=piece.offset + piece.nbytes, dtype=torch.uint8)
    return mapped[piece.offset :].view(count, piece.nbytes // count)


def read_rows(stored: Stored, rows: Tensor) -> Tensor:
    """Rows of a stored matrix [V, H], [len(rows), H] in its own dtype; only their pages of the file are read.

    Raises CheckpointError for a row that is not there.
    """
    count = stored.shape[0]
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise CheckpointError(f"token {int(rows.max())} is outside the target's vocabulary of {count}")
    return row_matrix(stored).index_select(0, rows).view(torch_dtype(stored.dtype))


def torch_dtype(name: str) -> Any:
    """The torch dtype of a safetensors dtype ("BF16", "F16", "F32")."""
    import torch

    return getattr(torch, _NAMES[name])


def _chunks(stored: Stored) -> Iterator[tuple[Path, int, int]]:
    """(file, offset, bytes) of at most CHUNK bytes each, in order, cut where a PIECE of the file ends."""
    for piece in stored.pieces:
        offset, end = piece.offset, piece.offset + piece.nbytes
        while offset < end:
            count = min(CHUNK, end - offset)
            edge = (offset // PIECE + 1) * PIECE - offset
            if edge < count and edge % _itemsize(stored) == 0:
                count = edge
            yield piece.file, offset, count
            offset += count


def _itemsize(stored: Stored) -> int:
    return {"BF16": 2, "F16": 2, "F32": 4}[stored.dtype]


def _elements(stored: Stored) -> int:
    return stored.nbytes // _itemsize(stored)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
