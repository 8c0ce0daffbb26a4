"""Mapped files of weights: their bytes, what is pinned of them for a GPU, and how tensors are cut where pieces end."""

from __future__ import annotations

import math
import os
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taugate.errors import CheckpointError
from taugate.target import loading, pages
from taugate.target.pages import MappedFile
from taugate.target.shards import Piece, Stored

SIZE = 10_000  # two whole pieces of 4096 bytes and a rest
READ_ONLY = 8  # cudaHostRegisterReadOnly, from CUDA's driver_types.h


@pytest.fixture
def content():
    return os.urandom(SIZE)


@pytest.fixture
def mapped(content, tmp_path, monkeypatch):
    """A file in small pieces."""
    monkeypatch.setattr(pages, "PIECE", 4096)
    (tmp_path / "weights").write_bytes(content)
    file = MappedFile(tmp_path / "weights")
    yield file
    file._pinned.clear()  # the stand-in may be gone by now
    file.close()


class Result(int):
    """What CUDA answers."""

    def __str__(self):
        return "cudaSuccess" if self == 0 else "cudaErrorMemoryAllocation"


class Cuda:
    """The part of CUDA that pins: refuses after `most` pieces; remembers what is asked of it."""

    def __init__(self, most=1000):
        self.most, self.registered, self.unregistered, self.refusals = most, [], [], 0
        self._lock = threading.Lock()

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        with self._lock:
            if len(self.registered) >= self.most:
                self.refusals += 1
                return Result(2)
            self.registered.append((address, size, flags))
            return Result(0)

    def cudaHostUnregister(self, address):  # noqa: N802
        self.unregistered.append(address)
        return Result(0)


@pytest.fixture
def cuda(monkeypatch):
    import torch

    stand_in = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    return stand_in


@pytest.mark.parametrize(("offset", "count"), [(0, SIZE), (0, 1), (4095, 2), (8192, 1808), (9999, 1), (77, 0)])
def test_bytes_are_those_of_the_file(mapped, content, offset, count):
    assert mapped.bytes(offset, count).numpy().tobytes() == content[offset : offset + count]


def test_a_file_that_shrank_is_named_instead_of_killing_the_process(mapped):
    os.truncate(mapped.file, 9000)
    assert len(mapped.bytes(8000, 1000)) == 1000
    with pytest.raises(CheckpointError, match=r"weights ended at byte 9000 while it was read; copy it again$"):
        mapped.bytes(8000, 1001)


def test_a_file_that_cannot_be_mapped_is_one_sentence(tmp_path):
    (tmp_path / "empty").touch()
    for name, reason in (("empty", "cannot mmap an empty file"), ("missing", "No such file or directory")):
        with pytest.raises(CheckpointError, match=rf"/{name} cannot be read \([^\n]*{reason}[^\n]*\); copy it again$"):
            MappedFile(tmp_path / name)


def test_each_piece_is_pinned_once_and_given_back(mapped, cuda, tmp_path):
    """Where it lies in memory, for reading only, and no byte behind the file's end."""
    assert [mapped.pin(piece) for piece in (1, 2, 1, 0, 2)] == [""] * 5
    begin = mapped.bytes(0, 1).data_ptr()
    assert cuda.registered == [
        (begin + 4096, 4096, READ_ONLY), (begin + 8192, 1808, READ_ONLY), (begin, 4096, READ_ONLY),
    ]  # fmt: skip
    there = MappedFile(tmp_path / "weights")
    there.pin(0)
    there.pin(2)
    expected = [address for address, _, _ in cuda.registered[3:]]
    there.close()
    assert sorted(cuda.unregistered) == sorted(expected)
    assert not there.pinned(0, 1) and there.pinned_bytes == 0


def test_a_copy_across_pieces_is_not_read_by_the_gpu(mapped, cuda):
    """Two pieces are two registrations, even side by side; a transfer has to lie in one."""
    assert not mapped.pinned(0, 1)
    mapped.pin(0)
    assert mapped.pinned(0, 4096) and mapped.pinned(4095, 1)
    assert not mapped.pinned(4095, 2) and not mapped.pinned(4096, 1)
    mapped.pin(1)
    assert mapped.pinned(4096, 4096)
    assert not mapped.pinned(4095, 2) and not mapped.pinned(0, 8192)


def test_only_what_is_in_memory_is_pinned(mapped, cuda, monkeypatch):
    """Pinning would read the rest from the disk, with a lock held; both ends of a piece are asked for."""
    absent = {4096, 2 * 4096 + 1807}  # the first byte of a piece, and the last of another
    monkeypatch.setattr(mapped, "cached", lambda offset: offset not in absent)
    assert [mapped.pin(piece) for piece in range(3)] == ["", "", ""]
    assert [size for _, size, _ in cuda.registered] == [4096]
    absent.clear()
    mapped.pin(1)
    assert mapped.pinned(4096, 1), "once it is there"


def test_a_refusal_is_told_and_nothing_counts_as_pinned(mapped, cuda):
    cuda.most = 1
    assert [mapped.pin(0), mapped.pin(1)] == ["", "cudaErrorMemoryAllocation"]
    assert mapped.pinned(0, 1) and not mapped.pinned(4096, 1)


def test_a_ram_disk_is_known_as_one(tmp_path):
    """As coreutils' stat tells it."""
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/dev/shm"), Path("/proc/self")):
        told = subprocess.run(["stat", "-f", "-c", "%T", place], capture_output=True, text=True, check=True).stdout
        assert pages.on_ram_disk(place) == (told.strip() in ("tmpfs", "ramfs")), place


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Two layers of twelve and eight pieces in two files, the first with two tensors."""
    monkeypatch.setattr(pages, "PIECE", 4096)
    monkeypatch.setattr(loading, "PIECE", 4096)
    layers = []
    for name, sizes in (("first", (6 * 4096 + 100, 6 * 4096 - 100)), ("second", (8 * 4096,))):
        (tmp_path / name).write_bytes(os.urandom(sum(sizes)))
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        layers.append(
            {
                f"{name}.{n}": Stored("BF16", (size // 2,), (Piece(tmp_path / name, "", start, size),))
                for n, (start, size) in enumerate(zip(starts, sizes, strict=True))
            }
        )
    return layers


@pytest.fixture
def loader(monkeypatch, cuda):
    """With one thread that pins, so that what is asked of CUDA has an order."""
    monkeypatch.setattr(loading, "_PINNERS", 1)
    loader = loading.Loader("cpu")
    yield loader
    for file in loader._files.values():
        file._pinned.clear()  # the stand-in is gone when the loader is


def settled(loader):
    """When all that was asked of the thread that pins has been done."""
    loader._pinners.submit(lambda: None).result(timeout=30)


def test_files_are_pinned_in_the_order_of_need_each_piece_once(loader, checkpoint, cuda):
    loader.pin(reversed(checkpoint))
    settled(loader)
    begins = {name.name: file.bytes(0, 1).data_ptr() for name, file in loader._files.items()}
    expected = [begins["second"] + 4096 * n for n in range(8)] + [begins["first"] + 4096 * n for n in range(12)]
    assert [address for address, _, _ in cuda.registered] == expected
    assert "unpinned" not in loader.facts()


def test_pinning_stops_where_cuda_refuses_and_the_facts_say_so(loader, checkpoint, cuda):
    cuda.most = 3
    loader.pin(checkpoint)
    settled(loader)
    assert len(cuda.registered) == 3 and cuda.refusals == 1, "it is not asked again"
    assert loader.facts()["unpinned"] == "cudaErrorMemoryAllocation"


def test_a_refusal_outlasts_what_other_threads_pin_meanwhile(loader, checkpoint, cuda):
    """A thread that was let in before the refusal may finish after it."""
    file = loader._open(next(iter(checkpoint[0].values())).pieces[0].file)
    let_in, refused, pin = threading.Event(), threading.Event(), file.pin

    def slow_or_refused(piece):
        if piece == 1:
            return "cudaErrorMemoryAllocation"
        let_in.set()
        assert refused.wait(timeout=30)
        return pin(piece)

    file.pin = slow_or_refused
    before = threading.Thread(target=loader._pin, args=(file.file, 0))
    before.start()
    assert let_in.wait(timeout=30)
    loader._pin(file.file, 1)
    refused.set()
    before.join(timeout=30)
    assert file.pinned(0, 1)
    assert loader.facts()["unpinned"] == "cudaErrorMemoryAllocation"


def test_what_is_pinned_arrives_as_what_is_not(loader, checkpoint, cuda):
    """Bit for bit; on a CPU the copy from pinned pages is an ordinary one."""
    import torch

    for pinned in (False, True):
        if pinned:
            loader.pin(checkpoint)
            settled(loader)
            loader._ring = iter(())  # not through the ring, then
        for tensors in checkpoint:
            there = {key: torch.zeros(stored.shape, dtype=torch.bfloat16) for key, stored in tensors.items()}
            loader.start(tensors, there).arrive()
            whole = b"".join(there[key].view(torch.uint8).numpy().tobytes() for key in tensors)
            assert whole == next(iter(tensors.values())).pieces[0].file.read_bytes()
    assert len(cuda.registered) == 20


def test_other_steps_have_their_turn_between_chunks_and_their_errors_arrive(loader, checkpoint, cuda):
    """Of few steps all, of many one for three chunks, while the data arrives as ever; one that fails is not lost."""
    import torch

    (tensors, _), there = checkpoint, {}
    for count, taken in ((2, 2), (99, len([c for s in tensors.values() for c in loading._chunks(s)]) // 3)):
        there = {key: torch.zeros(stored.shape, dtype=torch.bfloat16) for key, stored in tensors.items()}
        steps = iter(range(count))
        loader.start(tensors, there, meanwhile=steps).arrive()
        assert count - len(list(steps)) == taken
        whole = b"".join(there[key].view(torch.uint8).numpy().tobytes() for key in tensors)
        assert whole == next(iter(tensors.values())).pieces[0].file.read_bytes()

    def fails():
        yield
        raise CheckpointError("a step failed")

    with pytest.raises(CheckpointError, match="a step failed"):
        loader.start(tensors, there, meanwhile=fails()).arrive()


def test_what_was_pinned_is_given_back_with_the_loader(checkpoint, cuda):
    loader = loading.Loader("cpu")
    loader.pin(checkpoint)
    loader._pinners.shutdown(wait=True)
    del loader
    assert sorted(cuda.unregistered) == sorted(address for address, _, _ in cuda.registered)
    assert len(cuda.unregistered) == 20


# Also near a border, where one drawn at random seldom lies.
_OFFSETS = st.one_of(
    st.integers(0, 3 * pages.PIECE),
    st.builds(lambda piece, near: max(0, piece * pages.PIECE + near), st.integers(0, 3), st.integers(-20, 20)),
)
_BYTES = st.one_of(st.integers(1, 40), st.integers(1, 3 * pages.PIECE), st.sampled_from([loading.CHUNK, pages.PIECE]))


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(["BF16", "F16", "F32"]), st.lists(st.tuples(_OFFSETS, _BYTES), min_size=1, max_size=3))
def test_chunks_tile_a_tensor_and_end_where_pieces_of_the_file_do(dtype, pieces):
    """Sizes are those of real files; nothing is read."""
    itemsize = 4 if dtype == "F32" else 2
    stored = tuple(
        Piece(Path(str(n)), "", offset, math.ceil(size / itemsize) * itemsize)
        for n, (offset, size) in enumerate(pieces)
    )
    chunks = list(loading._chunks(Stored(dtype, (sum(p.nbytes for p in stored) // itemsize,), stored)))
    assert all(0 < count <= loading.CHUNK and count % itemsize == 0 for _, _, count in chunks)
    for piece in stored:
        of_file = [(offset, count) for file, offset, count in chunks if file == piece.file]
        ends = [piece.offset, *(offset + count for offset, count in of_file)]
        assert [offset for offset, _ in of_file] == ends[:-1] and ends[-1] == piece.offset + piece.nbytes
        if piece.offset % itemsize == 0:
            crossing = [o for o, count in of_file if o // pages.PIECE != (o + count - 1) // pages.PIECE]
            assert not crossing
    assert [file for file, _, _ in chunks] == sorted((file for file, _, _ in chunks), key=lambda file: int(file.name))
