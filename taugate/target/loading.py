"""Weights from files to a device: many readers, a ring of pinned host memory, one CUDA stream for the copies.

A tensor is read in chunks. Each reader takes a free slot of the ring, reads a chunk into it (the page cache gives one
thread 8 to 10 GB/s, so it takes several to keep a 55 GB/s link busy), and queues the copy to the device; the slot is
free again when that copy is over. So reading, copying and computing overlap, and pinned memory does not grow with the
model. On a CPU the same readers copy straight to the destination.
"""

from __future__ import annotations

import os
import queue
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.errors import CheckpointError
from taugate.target.shards import Stored

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 32 << 20
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


@dataclass(frozen=True)
class Loading:
    """Copies that are under way."""

    parts: list[Future[None]]
    stream: Any

    def arrive(self) -> Any:
        """Return when all copies are queued; the result is a CUDA event after which the data is there (CPU: None).

        Raises CheckpointError when a file could not be read.
        """
        for part in self.parts:
            part.result()
        return self.stream.record_event() if self.stream is not None else None


class Loader:
    """Reads stored tensors into tensors of one device ("cpu" or "cuda"). Pinned memory and files last as long as it."""

    def __init__(self, device: str, readers: int | None = None) -> None:
        import torch

        self.cuda = device != "cpu"
        self.readers = readers or (min(14, max(2, (os.cpu_count() or 2) - 2)) if self.cuda else 2)
        self.stream = torch.cuda.Stream() if self.cuda else None
        self._pool = ThreadPoolExecutor(self.readers, thread_name_prefix="reader")
        self._files: dict[Path, int] = {}
        self._slots: queue.SimpleQueue[tuple[Tensor, Any]] = queue.SimpleQueue()
        # A read takes ten times as long as a copy, so a few slots more than readers keep both busy.
        for _ in range(self.readers + 4 if self.cuda else self.readers):
            event = torch.cuda.Event(blocking=True) if self.cuda else None
            self._slots.put((torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self.cuda), event))
        weakref.finalize(self, _close, self._pool, self._files)

    def start(self, tensors: Mapping[str, Stored], destinations: Mapping[str, Tensor], after: Any = ()) -> Loading:
        """Begin to fill `destinations` (contiguous, by the same keys), converting where dtypes differ.

        after: CUDA events that have to have happened before the destinations may be overwritten.
        """
        for event in after:
            self.stream.wait_event(event)
        parts = []
        for key, stored in tensors.items():
            flat, begin = destinations[key].view(-1), 0
            for file, offset, count in _chunks(stored):
                if file not in self._files:
                    self._files[file] = os.open(file, os.O_RDONLY)
                elements = count // _itemsize(stored)
                part = flat[begin : begin + elements]
                parts.append(self._pool.submit(self._copy, file, offset, count, stored.dtype, part))
                begin += elements
        return Loading(parts, self.stream)

    def _copy(self, file: Path, offset: int, count: int, dtype: str, destination: Tensor) -> None:
        import torch

        slot, event = self._slots.get()
        try:
            if event is not None:
                event.synchronize()
            read_exactly(self._files[file], file, slot[:count], offset)
            source = slot[:count].view(getattr(torch, _NAMES[dtype]))
            with torch.inference_mode(), torch.cuda.stream(self.stream) if self.cuda else nullcontext():
                destination.copy_(source, non_blocking=True)
                if event is not None:
                    event.record()
        finally:
            self._slots.put((slot, event))


def _close(pool: ThreadPoolExecutor, files: dict[Path, int]) -> None:
    # A task holds its loader, so none is left; this may well run in the thread of the last one, which cannot be joined.
    pool.shutdown(wait=False)
    for handle in files.values():
        os.close(handle)


def read_exactly(handle: int, file: Path, into: Tensor, offset: int) -> None:
    """Fill a uint8 CPU tensor from an open file. Raises CheckpointError if the file ends before."""
    view = memoryview(into.numpy())
    while view:
        got = os.preadv(handle, [view], offset)
        if got <= 0:
            raise CheckpointError(f"{file} ended at byte {offset} while it was read; copy it again")
        view, offset = view[got:], offset + got


def read_rows(stored: Stored, rows: Tensor) -> Tensor:
    """Rows of a stored matrix [V, H], [len(rows), H] in its own dtype; only their pages of the file are read.

    Raises CheckpointError for a row that is not there.
    """
    import torch

    (piece,), count = stored.pieces, stored.shape[0]
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise CheckpointError(f"token {int(rows.max())} is outside the target's vocabulary of {count}")
    mapped = torch.from_file(str(piece.file), shared=False, size=piece.offset + piece.nbytes, dtype=torch.uint8)
    matrix = mapped[piece.offset :].view(count, piece.nbytes // count)
    return matrix.index_select(0, rows).view(getattr(torch, _NAMES[stored.dtype]))


def _chunks(stored: Stored) -> Iterator[tuple[Path, int, int]]:
    """(file, offset, bytes) of at most CHUNK bytes each, in order."""
    for piece in stored.pieces:
        for begin in range(0, piece.nbytes, CHUNK):
            yield piece.file, piece.offset + begin, min(CHUNK, piece.nbytes - begin)


def _itemsize(stored: Stored) -> int:
    return {"BF16": 2, "F16": 2, "F32": 4}[stored.dtype]


def _elements(stored: Stored) -> int:
    return stored.nbytes // _itemsize(stored)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
