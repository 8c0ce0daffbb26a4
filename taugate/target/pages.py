"""Files of weights as memory: mapped, asked for ahead, and pinned piece by piece so that a GPU reads them itself.

A GPU that reads the page cache needs no copy by the processor, and its link is busy nine tenths of the time, where a
ring of pinned memory gets half to two thirds (measured on an H200). But pinning costs 50 to 90 ms a GB, once, most of
it under a lock of the kernel: so it is done by few threads in the background, in the order of need, and only for what
is in the page cache; what is not pinned yet goes through the ring.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from taugate.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 64 << 20  # of a file, pinned at a time; a copy may not cross from one to the next
_READ_ONLY = 8  # cudaHostRegisterReadOnly: the mapping may not be written to


def on_ram_disk(file: Path) -> bool:
    """Whether the file's pages are in memory for good, so that pinning takes nothing from anybody; False if unknown."""
    number = os.stat(file).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    told = Path("/proc/self/mountinfo")
    for line in told.read_text(encoding="utf-8").splitlines() if told.is_file() else ():
        before, _, after = line.partition(" - ")  # … major:minor root mount options - type source options
        if before.split()[2] == device:
            return after.split()[0] in ("tmpfs", "ramfs")
    return False


class MappedFile:
    """One file. Raises CheckpointError if it cannot be opened and mapped."""

    def __init__(self, file: Path) -> None:
        import numpy
        import torch

        self.file = file
        try:
            self._handle = os.open(file, os.O_RDONLY)
            try:
                self._map = mmap.mmap(self._handle, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            except BaseException:
                os.close(self._handle)
                raise
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); copy it again") from None
        self._address = numpy.frombuffer(self._map, numpy.uint8).ctypes.data
        # By its address, since torch warns of a buffer that may not be written to. It is only ever a source.
        self._bytes = torch.frombuffer((ctypes.c_uint8 * len(self._map)).from_address(self._address), dtype=torch.uint8)
        self._pinned: dict[int, int] = {}  # address of each piece by its number

    def bytes(self, offset: int, count: int) -> Tensor:
        """Bytes of the file. Raises CheckpointError if it has become shorter, since touching such a page is fatal."""
        size = os.fstat(self._handle).st_size
        if offset + count > size:
            raise CheckpointError(f"{self.file} ended at byte {size} while it was read; copy it again")
        return self._bytes[offset : offset + count]

    def cached(self, offset: int) -> bool:
        """Whether the byte at `offset` is in the page cache, as far as the file system tells."""
        try:
            os.preadv(self._handle, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def read_ahead(self, offset: int, count: int) -> None:
        """Ask for these bytes unless they seem to be in the page cache."""
        if not self.cached(offset):
            os.posix_fadvise(self._handle, offset, count, os.POSIX_FADV_WILLNEED)

    def pin(self, piece: int) -> str:
        """Pin piece number `piece` if it is in the page cache. Returns CUDA's reason if it refuses, else ""."""
        import torch

        begin = piece * PIECE
        size = min(PIECE, len(self._map) - begin)
        if piece in self._pinned or not (self.cached(begin) and self.cached(begin + size - 1)):
            return ""
        address = self._address + begin
        result = torch.cuda.cudart().cudaHostRegister(address, size, _READ_ONLY)
        if int(result):
            return str(result)
        self._pinned[piece] = address
        return ""

    def pinned(self, offset: int, count: int) -> bool:
        """Whether a GPU can read these bytes by itself."""
        return offset // PIECE in self._pinned and (offset + count - 1) // PIECE == offset // PIECE

    @property
    def pinned_bytes(self) -> int:
        return sum(min(PIECE, len(self._map) - piece * PIECE) for piece in list(self._pinned))

    def unpin(self) -> None:
        """Give back what is pinned. Nothing may be under way from it."""
        import torch

        for address in self._pinned.values():
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def close(self) -> None:
        """Unpin, and let go of the file."""
        self.unpin()
        os.close(self._handle)
