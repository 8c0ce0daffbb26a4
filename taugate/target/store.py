"""The store of captured states: identity is the key, names are for people, and nothing is ever half there.

    states/<target>/<key[:2]>/<key>/meta.json + the safetensors file that meta.json names

A key is the hash of everything that decides the numbers. Tensors are looked up one by one (`tap.3`, `final_hidden`),
so that two drafters share the taps that they share.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.errors import StoreError
from taugate.files import sha256_file, sha256_json, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

CONVENTION = "1: tap.L = raw output of decoder layer L (0-based, before any norm); final_hidden = after the final norm"
FINAL_HIDDEN = "final_hidden"


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
    """States under `root`/states/<target>. Safe for several readers and one writer per key (rename is atomic)."""

    def __init__(self, root: Path, target: str) -> None:
        self.root = root / "states" / re.sub(r"[^A-Za-z0-9._-]+", "-", target)

    def directory(self, key: str) -> Path:
        return self.root / key[:2] / key

    def names(self, key: str) -> set[str]:
        """Names of the tensors stored under `key`; empty when there are none. Raises StoreError if damaged."""
        return set(self._meta(key).get("tensors", ()))

    def missing(self, key: str, names: Iterable[str]) -> list[str]:
        """Which of `names` are not stored under `key`, sorted."""
        return sorted(set(names) - self.names(key))

    def adopt(self, key: str, file: Path, fields: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Add the tensors of a safetensors file to the entry of `key`; tensors that are there already stay.

        The new file is written and synced under a new name before meta.json is replaced, so an interruption
        leaves the old entry or the new one.
        """
        from safetensors.torch import load_file, save_file

        tensors = load_file(file)
        old = self._meta(key)
        if old:
            tensors |= load_file(self._verified(key, old))
        directory = self.directory(key)
        directory.mkdir(parents=True, exist_ok=True)
        name = f"states-{old.get('generation', 0) + 1}.safetensors" if old else "states.safetensors"
        path, partial = directory / name, directory / f".{name}.{os.getpid()}"
        save_file(tensors, partial)
        with open(partial, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, path)
        meta = {
            "key": key,
            "file": name,
            "generation": old.get("generation", 0) + 1 if old else 0,
            "sha256": sha256_file(path),
            "tensors": {
                n: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for n, t in tensors.items()
            },
            "fields": dict(fields),
            "provenance": [*old.get("provenance", []), dict(provenance)],
        }
        write_atomic(directory / "meta.json", json.dumps(meta, indent=1))
        if old and old["file"] != name:
            (directory / old["file"]).unlink(missing_ok=True)

    def load(self, key: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors [S, H] by name. Raises StoreError naming what is missing, or the file that is damaged."""
        from safetensors import safe_open

        names = list(names)
        if absent := self.missing(key, names):
            raise StoreError(
                f"the store {self.root} lacks {', '.join(absent)} for key {key[:16]}…; "
                "`pytest -m gpu_window` captures what is missing"
            )
        path = self._verified(key, self._meta(key))
        with safe_open(path, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in names}

    def _meta(self, key: str) -> dict[str, Any]:
        path = self.directory(key) / "meta.json"
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"{path} is damaged ({error}); delete its directory to capture the state again") from None
        if meta.get("key") != key or sha256_json(meta.get("fields")) != key:
            raise StoreError(f"{path} describes another state than its key; delete its directory to capture it again")
        return meta

    def _verified(self, key: str, meta: Mapping[str, Any]) -> Path:
        path = self.directory(key) / meta["file"]
        if not path.is_file() or sha256_file(path) != meta["sha256"]:
            what = "is missing" if not path.is_file() else "does not have the content that meta.json names"
            raise StoreError(f"{path} {what}; delete its directory to capture the state again")
        return path
