"""Small file helpers: content hashes and writes that leave the old file or the new one, never half of either."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20
_FULL = {errno.ENOSPC: "is full", errno.EDQUOT: "is over its quota", errno.EFBIG: "takes no file of this size"}


def sha256_file(path: Path, on_read: Callable[[int], None] = lambda count: None) -> str:
    """Hex SHA-256 of a file's bytes. `on_read` gets the number of bytes of each chunk, for progress."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            on_read(len(chunk))
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` through a temporary file in the same directory, fsync and rename.

    An OSError names `path`, also where the system names nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Have the contents of a file or the entries of a directory on the disk before anything is said about them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def disk_full(error: BaseException) -> str | None:
    """What a failed write says of the disk ("is full", …), or None if the disk is not to blame."""
    if isinstance(error, OSError):
        return _FULL.get(error.errno or 0)
    # safetensors writes in Rust, and gives the number in its text only.
    known = _FULL.items() if type(error).__name__ == "SafetensorError" else ()
    return next((text for code, text in known if f"os error {code})" in str(error)), None)


def file_error(error: OSError) -> str:
    """One sentence for a file or directory that the system refuses; empty if the error is about something else."""
    if error.filename is None:
        return ""
    if said := disk_full(error):
        return f"the disk of {os.path.dirname(error.filename) or '.'} {said}: make room there"
    return f"{error.filename} cannot be used ({error.strerror}); correct the path or its permissions"


def sha256_files(paths: Iterable[Path], root: Path) -> str:
    """One hash over the relative names and contents of several files, independent of the order given."""
    return sha256_json(sorted((path.relative_to(root).as_posix(), sha256_file(path)) for path in paths))
