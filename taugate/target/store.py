"""The store of captured states: identity is the key, names are for people, and nothing is ever half there.

    states/<target>/<key[:2]>/<key>/{states.safetensors, meta.json}

    python -m taugate.target.store size
    python -m taugate.target.store prune --older-than 30d --max-size 200G --dry-run

A key is the hash of everything that decides the numbers. Tensors are looked up one by one (`tap.3`, `final_hidden`),
so that two drafters share the taps that they share. A new entry is made in a directory of its own and renamed into
place. Taps that are added later go into a new file, states-1.safetensors and so on, that takes over when meta.json is
replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from taugate.errors import StoreError
from taugate.files import disk_full, sha256_json, sync, write_atomic
from taugate.target.meta import META, content, is_there, read_meta, require_file, verified_file

if TYPE_CHECKING:
    from torch import Tensor

CONVENTION = "1: tap.L = raw output of decoder layer L (0-based, before any norm); final_hidden = after the final norm"
FINAL_HIDDEN = "final_hidden"
NEW = ".new-"
IN_USE, _WRITING = ".in-use", ".writing.lock"
_READ_AGAIN = 3  # times; an entry that grows while it is read has another file each time


def tap_name(layer: int) -> str:
    """Name of the tensor that holds the raw output of decoder layer `layer`."""
    return f"tap.{layer}"


@dataclass(frozen=True)
class StateIdentity:
    """Everything that decides a captured state except the token ids. `key(ids)` is the store's key."""

    target: str
    weights_sha256: str
    tokenizer_sha256: str
    dtype: str
    kernel_path: str
    device: str
    versions: Mapping[str, str]
    capture_code_sha256: str

    def fields(self, token_ids: Iterable[int]) -> dict[str, Any]:
        return {
            "convention": CONVENTION,
            "weights_sha256": self.weights_sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "dtype": self.dtype,
            "kernel_path": self.kernel_path,
            "device": self.device,
            "versions": dict(self.versions),
            "capture_code_sha256": self.capture_code_sha256,
            "token_ids": list(token_ids),
        }

    def key(self, token_ids: Iterable[int]) -> str:
        return sha256_json(self.fields(token_ids))


class StateStore:
    """States under `root`/states/<target>: several readers, one writer at a time, and a prune that waits for neither.

    While an object of this class is in use, a prune leaves this target's states alone.
    """

    def __init__(self, root: Path, target: str) -> None:
        self.root = root / "states" / re.sub(r"[^A-Za-z0-9._-]+", "-", target)
        self._held: weakref.finalize[..., StateStore] | None = None

    def directory(self, key: str) -> Path:
        return self.root / key[:2] / key

    def stored_keys(self) -> Iterator[str]:
        """Keys of all entries, in order."""
        return (path.name for path in sorted(self.root.glob("[0-9a-f][0-9a-f]/*")) if not path.name.startswith("."))

    def meta(self, key: str) -> dict[str, Any]:
        """What meta.json says of `key`, or {} without an entry. Raises StoreError if it is damaged."""
        self._hold()
        return read_meta(self.directory(key), key)

    def names(self, key: str) -> set[str]:
        """Names of the tensors stored under `key`; empty when there are none.

        Raises StoreError if it is damaged, as far as the size of the file tells; `verify` and `load` read it all.
        """
        for _ in range(_READ_AGAIN):
            meta = self.meta(key)
            if not meta or is_there(self.directory(key), meta) or self.meta(key) == meta:
                break  # else taps were added meanwhile, and the file that the old meta.json named is gone
        if meta:
            require_file(self.directory(key), meta)
        return set(meta.get("tensors", ()))

    def verify(self, key: str) -> None:
        """Read the whole entry of `key`, if there is one. Raises StoreError naming the file that is damaged."""
        if names := self.names(key):
            self.load(key, names)

    def missing(self, key: str, names: Iterable[str]) -> list[str]:
        """Which of `names` are not stored under `key`, sorted."""
        return sorted(set(names) - self.names(key))

    def load(self, key: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors [S, H] by name. Raises StoreError naming what is missing, or the file that is damaged."""
        from safetensors import safe_open

        names = list(names)
        if not names:
            return {}
        for attempt in range(_READ_AGAIN):
            meta = self.meta(key)
            if absent := sorted(set(names) - set(meta.get("tensors", ()))):
                raise StoreError(
                    f"the store {self.root} lacks {', '.join(absent)} for key {key[:16]}…; "
                    "`pytest -m gpu_window` captures what is missing"
                )
            try:
                with safe_open(verified_file(self.directory(key), meta), framework="pt") as stream:
                    if absent := sorted(set(names) - set(stream.keys())):
                        raise StoreError(
                            f"{self.directory(key) / META} names {', '.join(absent)}, which {meta['file']} lacks; "
                            "delete its directory to capture the state again"
                        )
                    states = {name: stream.get_tensor(name) for name in names}
            except (StoreError, OSError):
                if attempt + 1 == _READ_AGAIN or self.meta(key) == meta:
                    raise
                continue  # taps were added meanwhile, and the file that the old meta.json named is gone
            with contextlib.suppress(OSError):  # a store that may only be read
                os.utime(self.directory(key) / META)  # the time of the last use, for `prune`
            return states
        raise AssertionError("not reached")

    def adopt(self, key: str, file: Path, fields: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Add the tensors of a safetensors file to the entry of `key`; tensors that are there already stay.

        An interruption at any moment leaves the old entry or the new one. Raises StoreError if the old one is damaged,
        and when the disk is full.
        """
        try:
            self._hold(make=True)
            with FileLock(self.root / _WRITING):
                if old := self.meta(key):
                    self._extend(key, file, old, provenance)
                else:
                    self._create(key, file, fields, provenance)
        except Exception as error:
            if said := disk_full(error):
                raise StoreError(
                    f"the disk of {self.root} {said}: make room there, for example with "
                    "`python -m taugate.target.store prune`; nothing half was kept"
                ) from error
            raise

    def _create(self, key: str, file: Path, fields: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        parent = self.directory(key).parent
        parent.mkdir(exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=parent, prefix=NEW))
        try:
            new.chmod(0o755)
            name = "states.safetensors"
            shutil.copyfile(file, new / name)
            meta = {"key": key, "file": name, "generation": 0, **content(new / name), "fields": dict(fields)}
            write_atomic(new / META, json.dumps(meta | {"provenance": [dict(provenance)]}, indent=1))
            sync(new / name)
            sync(new)
            os.rename(new, self.directory(key))
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        sync(parent)

    def _extend(self, key: str, file: Path, old: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        from safetensors.torch import load_file, save_file

        directory, generation = self.directory(key), old["generation"] + 1
        for left in [*directory.glob(f"{NEW}*"), *directory.glob(".*tmp*"), *directory.glob(f".{META}.*")]:
            left.unlink()  # of writers that were killed; this one is alone
        tensors = load_file(file) | load_file(verified_file(directory, old))
        if tensors.keys() == old["tensors"].keys():
            return
        path, partial = directory / f"states-{generation}.safetensors", directory / f"{NEW}{generation}"
        save_file(tensors, partial)
        sync(partial)
        os.replace(partial, path)
        added = {"file": path.name, "generation": generation, **content(path)}
        meta = {**old, **added, "provenance": [*old["provenance"], dict(provenance)]}
        write_atomic(directory / META, json.dumps(meta, indent=1))
        sync(directory)
        (directory / old["file"]).unlink(missing_ok=True)

    def _hold(self, make: bool = False) -> None:
        """Share a lock for as long as this object lives: `prune` takes it alone, or leaves this target's states be."""
        if self._held or not (make or self.root.is_dir()):
            return
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(self.root / IN_USE, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            if make:
                raise
            return  # a store that may only be read
        self._held = weakref.finalize(self, os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_SH)


if __name__ == "__main__":
    from taugate.target.prune import main

    sys.exit(main())
