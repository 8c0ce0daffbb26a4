"""meta.json of an entry in the store: what it says of the states beside it, and whether that is so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taugate.errors import StoreError
from taugate.files import sha256_file, sha256_json
from taugate.target.shards import read_header

META = "meta.json"
_KINDS = {"file": str, "sha256": str, "bytes": int, "tensors": dict, "generation": int, "provenance": list}
_AGAIN = "delete its directory to capture the state again"


def content(path: Path) -> dict[str, Any]:
    """The part of meta.json that describes a states file."""
    tensors = {name: {"dtype": t.dtype, "shape": list(t.shape)} for name, t in sorted(read_header(path).items())}
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size, "tensors": tensors}


def read_meta(directory: Path, key: str) -> dict[str, Any]:
    """meta.json of the entry in `directory`, or {} without an entry. Raises StoreError if it is damaged."""
    path = directory / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if directory.is_dir():
            raise StoreError(f"{path} is missing; {_AGAIN}") from None
        return {}
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}); {_AGAIN}") from None
    if not isinstance(meta, dict) or meta.get("key") != key or sha256_json(meta.get("fields")) != key:
        raise StoreError(f"{path} describes another state than its key; {_AGAIN}")
    if wrong := [name for name, kind in _KINDS.items() if not isinstance(meta.get(name), kind)]:
        raise StoreError(f"{path} lacks a usable {wrong[0]}; {_AGAIN}")
    return meta


def is_there(directory: Path, meta: Mapping[str, Any]) -> bool:
    """Whether the states file has the size that meta.json names."""
    path = directory / meta["file"]
    return path.is_file() and path.stat().st_size == meta["bytes"]


def require_file(directory: Path, meta: Mapping[str, Any]) -> Path:
    """The states file, its size compared. Raises StoreError naming it."""
    path = directory / meta["file"]
    if not is_there(directory, meta):
        what = f"does not have the size that {META} names" if path.is_file() else "is missing"
        raise StoreError(f"{path} {what}; {_AGAIN}")
    return path


def verified_file(directory: Path, meta: Mapping[str, Any]) -> Path:
    """The states file, read whole and compared. Raises StoreError naming it."""
    path = require_file(directory, meta)
    if sha256_file(path) != meta["sha256"]:
        raise StoreError(f"{path} does not have the content that {META} names; {_AGAIN}")
    return path
