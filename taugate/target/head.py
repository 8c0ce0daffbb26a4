"""The head bundle: the target's input embedding and output head, all that replay needs of the target.

    python -m taugate.target.head --model-path DIR --out FILE

Writes `embedding` [V, H] and `head` [V, H] (one tensor when they are tied) as stored, to one safetensors file.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from taugate.errors import CheckpointError, TaugateError
from taugate.files import sha256_file
from taugate.target.checkpoint import read_target
from taugate.target.shards import shard_files

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING_KEYS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
HEAD_KEYS = ("lm_head.weight",)


@dataclass(frozen=True)
class HeadBundle:
    """embedding [V, H] and head [V, H] of one target; `weights_sha256` says which."""

    embedding: Tensor
    head: Tensor
    weights_sha256: str


def write_bundle(model_path: Path, out: Path) -> str:
    """Write the bundle of the checkpoint at `model_path` to `out` and return the file's SHA-256.

    Raises CheckpointError when a tensor is not there.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    info = read_target(model_path)
    found: dict[str, Tensor] = {}
    for shard in shard_files(model_path):
        with safe_open(shard, framework="pt") as stream:
            for name in set(stream.keys()) & {*EMBEDDING_KEYS, *HEAD_KEYS}:
                found["head" if name in HEAD_KEYS else "embedding"] = stream.get_tensor(name)
    if "embedding" not in found:
        raise CheckpointError(f"{model_path} holds none of {', '.join(EMBEDDING_KEYS)}")
    if "head" not in found and not info.tied_embeddings:
        raise CheckpointError(f"{model_path} holds no lm_head.weight, and its config does not tie the embeddings")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    save_file(found, partial, metadata={"weights_sha256": info.weights_sha256})
    partial.replace(out)
    return sha256_file(out)


def read_bundle(path: Path, dtype: str = "float32") -> HeadBundle:
    """Read a bundle in the precision of the replay ("float32" or "bfloat16")."""
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stream:
        embedding = stream.get_tensor("embedding").to(getattr(torch, dtype))
        head = stream.get_tensor("head").to(getattr(torch, dtype)) if "head" in stream.keys() else embedding  # noqa: SIM118
        return HeadBundle(embedding, head, stream.metadata()["weights_sha256"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        print(json.dumps({"event": "done", "sha256": write_bundle(args.model_path, args.out)}), flush=True)
    except TaugateError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
