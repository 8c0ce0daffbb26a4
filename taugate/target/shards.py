"""The safetensors files of a checkpoint by their headers alone: where each tensor lies, and that all of it is there.

Format (https://github.com/huggingface/safetensors): 8 bytes of header length, the header as JSON, then the tensors; the
offsets in the header count from the end of the header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from taugate.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
          "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # fmt: skip
"""Bytes per element by the format's name of a dtype."""


@dataclass(frozen=True)
class Piece:
    """`nbytes` bytes of `file` from `offset` (counted from the file's beginning), stored under `key`."""

    file: Path
    key: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Stored:
    """A tensor as stored: `dtype` by the format's name ("BF16", "F32", …), row-major; its bytes are those of its
    pieces, one after the other. All have one piece but experts that a checkpoint stores one by one.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def where(self) -> str:
        """File and key of the first piece, for error messages."""
        return f"{self.pieces[0].file}: {self.pieces[0].key}"

    def joined(self, others: Sequence[Stored], shape: tuple[int, ...]) -> Stored:
        """This tensor and others, one after the other in memory, seen as one of `shape`."""
        parts = (self, *others)
        return replace(self, shape=shape, pieces=tuple(piece for part in parts for piece in part.pieces))


def shard_files(directory: Path) -> list[Path]:
    """The files that hold the checkpoint's tensors, in order of name: those of the index, else model.safetensors.

    Raises CheckpointError for one that is missing.
    """
    index = directory / INDEX
    if not index.is_file():
        if (directory / SINGLE).is_file():
            return [directory / SINGLE]
        parts = sorted(path.name for path in directory.glob("model-*.safetensors"))
        if parts:
            raise CheckpointError(f"{index} is missing, although {parts[0]} is there; copy the checkpoint again")
        raise CheckpointError(f"{directory} holds neither {SINGLE} nor {INDEX}; a target is read from safetensors only")
    names = sorted(set(read_index(directory).values()))
    for name in names:
        if not (directory / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is missing from {directory}; copy it again")
    return [directory / name for name in names]


def read_index(directory: Path) -> dict[str, str]:
    """The index's map from key to file name; empty without an index. Raises CheckpointError if it is unusable."""
    path = directory / INDEX
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        index["metadata"]  # transformers does not load without it
        names = index["weight_map"]
        if names and all(isinstance(name, str) and "/" not in name for name in names.values()):
            return names
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{path} is not a readable index of shards; copy it again")


def read_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint by its stored key.

    Raises CheckpointError naming file and key: a shard that is missing, cut short or unreadable; a key that the index
    places in a shard that lacks it; a key in two shards.
    """
    found: dict[str, Stored] = {}
    for file in shard_files(directory):
        for key, tensor in read_header(file).items():
            if key in found:
                raise CheckpointError(f"{file} holds {key}, and so does {found[key].pieces[0].file}; copy both again")
            found[key] = tensor
    for key, name in read_index(directory).items():
        if key not in found or found[key].pieces[0].file.name != name:
            raise CheckpointError(f"{directory / name} lacks {key}, which {INDEX} places there; copy it again")
    return found


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file by key. Raises CheckpointError if it is no whole safetensors file."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            entries = json.loads(stream.read(length)) if 8 < 8 + length <= size else None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            entries = None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} is not a readable safetensors file; copy it again")
    entries.pop("__metadata__", None)
    tensors = {key: _stored(file, key, entry, 8 + length) for key, entry in entries.items()}
    end = max((piece.offset + piece.nbytes for t in tensors.values() for piece in t.pieces), default=8 + length)
    if end != size:
        raise CheckpointError(f"{file} is {size} bytes long but its header needs {end}; copy it again")
    return tensors


def _stored(file: Path, key: str, entry: Any, start: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype in DTYPES and 0 <= begin <= end and end - begin == math.prod(shape) * DTYPES[dtype]:
            return Stored(dtype, shape, (Piece(file, key, start + begin, end - begin),))
    except (KeyError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{file}: the header's entry of {key} does not fit its own shape and dtype; copy it again")
