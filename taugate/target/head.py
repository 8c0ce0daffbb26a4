"""The head bundle: the target's input embedding and output head, all that replay needs of the target.

    python -m taugate.target.head --model-path DIR --out FILE

Writes `embedding` [V, H] and `head` [V, H] (one tensor when they are tied) as stored, to one safetensors file. The same
weights give the same bytes, so bundles are kept by the hash of their content: heads/<sha256>.safetensors, and
heads/<weights_sha256>.json says which of them belongs to a target.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.command import Parser, one_sentence
from taugate.errors import CheckpointError, StoreError
from taugate.files import sha256_file, write_atomic
from taugate.target.checkpoint import find_checkpoint, read_config, text_config
from taugate.target.shards import Stored, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING_KEYS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")
HEAD_KEY = "lm_head.weight"


@dataclass(frozen=True)
class HeadBundle:
    """embedding [V, H] and head [V, H] of one target; `weights_sha256` says which."""

    embedding: Tensor
    head: Tensor
    weights_sha256: str


class HeadStore:
    """Bundles below `root`/heads."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "heads"

    def find(self, weights_sha256: str) -> Path | None:
        """The bundle of these weights, or None. Raises StoreError naming a file that is damaged or gone."""
        record = self._record(weights_sha256)
        if record is None:
            return None
        path = self._path(record["sha256"])
        if not path.is_file() or path.stat().st_size != record["bytes"]:
            what = "is missing" if not path.is_file() else f"does not have its {record['bytes']} bytes"
            raise StoreError(f"{path} {what}; delete {self._pointer(weights_sha256)} to fetch the bundle again")
        return path

    def load(self, weights_sha256: str, dtype: str = "float32") -> HeadBundle:
        """The bundle of these weights in the precision of the replay. Raises StoreError if it is missing or damaged."""
        path = self.find(weights_sha256)
        if path is None:
            raise StoreError(
                f"{self.directory} has no head bundle of the target with weights {weights_sha256[:16]}…; "
                "`pytest -m gpu_window` fetches it"
            )
        if sha256_file(path) != path.stem:
            raise StoreError(f"{path} is damaged; delete {self._pointer(weights_sha256)} and it to fetch it again")
        embedding, head = read_bundle(path, dtype)
        return HeadBundle(embedding, head, weights_sha256)

    def incoming(self, sha256: str) -> Path:
        """Where a bundle with this content is fetched to."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory / f"{sha256}.incoming"

    def adopt(self, file: Path, sha256: str, weights_sha256: str) -> None:
        """Move a file whose hash was verified to its place, then say whose it is."""
        record = {"sha256": sha256, "bytes": file.stat().st_size}
        os.replace(file, self._path(sha256))
        write_atomic(self._pointer(weights_sha256), json.dumps(record))

    def produce(self, model_path: Path, weights_sha256: str) -> None:
        """Make the bundle here from the checkpoint, unless it is there. Raises CheckpointError, StoreError."""
        if self.find(weights_sha256) is None:
            file = self.incoming(weights_sha256)
            self.adopt(file, write_bundle(model_path, file)["sha256"], weights_sha256)

    def _path(self, sha256: str) -> Path:
        return self.directory / f"{sha256}.safetensors"

    def _pointer(self, weights_sha256: str) -> Path:
        return self.directory / f"{weights_sha256}.json"

    def _record(self, weights_sha256: str) -> dict[str, Any] | None:
        path = self._pointer(weights_sha256)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record["sha256"], str) and isinstance(record["bytes"], int):
                return record
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            pass
        raise StoreError(f"{path} is damaged; delete it to fetch the bundle again")


def bundle_tensors(model_path: Path) -> dict[str, Stored]:
    """Where the checkpoint keeps `embedding` and, unless it is tied, `head`; nothing is read but headers.

    Raises CheckpointError when one of them is not there.
    """
    stored, config = read_tensors(model_path), read_config(model_path)
    embedding = next((stored[key] for key in EMBEDDING_KEYS if key in stored), None)
    if embedding is None:
        raise CheckpointError(f"{model_path} holds none of {', '.join(EMBEDDING_KEYS)}")
    found = {"embedding": embedding}
    tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings", False))
    if HEAD_KEY in stored and not tied:
        found["head"] = stored[HEAD_KEY]
    elif not tied:
        raise CheckpointError(f"{model_path} holds no {HEAD_KEY}, and its config does not tie the embeddings")
    return found


def write_bundle(model_path: Path, out: Path) -> dict[str, Any]:
    """Write the bundle of the checkpoint at `model_path` to `out`; returns {"sha256", "bytes"} of the file.

    The bytes are copied as stored, a piece at a time: no tensor is ever whole in memory. What writers that were killed
    have left is removed. Raises CheckpointError, and OSError naming `out` when the disk does not take it.
    """
    tensors = bundle_tensors(model_path)
    header, end = {}, 0
    for name, tensor in sorted(tensors.items()):
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end := end + tensor.nbytes]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants tensors aligned
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*.partial"):
        if not _runs(left.name.rsplit(".", 2)[1]):
            left.unlink(missing_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in sorted(tensors.items()):
                for piece in tensor.pieces:
                    _copy(piece.file, piece.offset, piece.nbytes, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, out)
    except OSError as error:
        if error.filename in (None, str(partial)):  # else it is the checkpoint that cannot be read
            error.filename = str(out)
        raise
    finally:
        partial.unlink(missing_ok=True)
    return {"sha256": sha256_file(out), "bytes": out.stat().st_size}


def read_bundle(path: Path, dtype: str = "float32") -> tuple[Tensor, Tensor]:
    """Embedding and head [V, H] of a bundle's file, in `dtype`; the same tensor twice when they are tied."""
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stream:
        embedding = stream.get_tensor("embedding").to(getattr(torch, dtype))
        return embedding, stream.get_tensor("head").to(embedding.dtype) if "head" in stream.keys() else embedding  # noqa: SIM118


def _runs(process: str) -> bool:
    """Whether a process with this number runs."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def _copy(file: Path, offset: int, count: int, to: Any) -> None:
    with open(file, "rb") as stream:
        stream.seek(offset)
        while count:
            chunk = stream.read(min(count, 1 << 24))
            if not chunk:
                raise CheckpointError(f"{file} became shorter while it was read; copy it again")
            to.write(chunk)
            count -= len(chunk)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m taugate.target.head", description=__doc__)
    parser.add_argument("--model-path", required=True, help="checkpoint: a directory, or ORG/NAME in the HF cache")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)

    def write() -> int:
        print(json.dumps({"event": "done", **write_bundle(find_checkpoint(args.model_path), args.out)}), flush=True)
        return 0

    return one_sentence(write)


if __name__ == "__main__":
    sys.exit(main())
