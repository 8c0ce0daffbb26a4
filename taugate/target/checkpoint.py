"""A target checkpoint as the host sees it: what its config says and which content it has. Holds no weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taugate.errors import CheckpointError
from taugate.files import sha256_file, sha256_json, write_atomic

FAMILIES = ("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_next", "qwen3", "llama")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class TargetInfo:
    """Facts about a target. Hashes are hex SHA-256 over contents, so a renamed or moved copy is the same target."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tied_embeddings: bool
    weights_sha256: str
    tokenizer_sha256: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> TargetInfo:
        return cls(**{**raw, "eos_token_ids": tuple(raw["eos_token_ids"])})


def read_target(directory: Path, memo: Path | None = None) -> TargetInfo:
    """Read config and content hashes. `memo`: file in which hashes of large shards are remembered by size and mtime.

    Raises CheckpointError naming the file that is missing or unusable.
    """
    config = _config(directory)
    text = config.get("text_config") or config
    model_type = text.get("model_type", "")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{directory / 'config.json'} is of model_type {model_type!r}; supported are {', '.join(FAMILIES)}"
        )
    try:
        eos = text.get("eos_token_id", config.get("eos_token_id"))
        return TargetInfo(
            name=directory.name,
            model_type=model_type,
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
            tied_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            weights_sha256=_weights_sha256(directory, config, memo),
            tokenizer_sha256=_tokenizer_sha256(directory),
        )
    except KeyError as error:
        raise CheckpointError(f"{directory / 'config.json'} lacks {error.args[0]}") from None


def tokenizer_files(directory: Path) -> list[Path]:
    """The files that decide how text becomes token ids, those that exist."""
    return [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]


def weight_shards(directory: Path) -> list[Path]:
    """All safetensors of the checkpoint, checked against its index and their own headers.

    Raises CheckpointError for a shard that the index names and the directory lacks, and for one that is cut short.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        shards = [directory / name for name in names]
    else:
        shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{directory} holds no .safetensors; a target is read from safetensors only")
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"{index} names {shard.name}, which is missing from {directory}")
        _check_length(shard)
    return shards


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"there is no target checkpoint at {directory}: {path.name} is missing; set target.path")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy the checkpoint again") from None


def _check_length(shard: Path) -> None:
    """A safetensors file is 8 bytes of header length, the header, and as many bytes as its last tensor ends at."""
    size = shard.stat().st_size
    with open(shard, "rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        try:
            entries = json.loads(stream.read(header)) if 8 + header <= size else None
        except (json.JSONDecodeError, UnicodeDecodeError):
            entries = None
    if entries is None:
        raise CheckpointError(f"{shard} is not a readable safetensors file; copy it again")
    end = max((e["data_offsets"][1] for name, e in entries.items() if name != "__metadata__"), default=0)
    if 8 + header + end != size:
        raise CheckpointError(f"{shard} is {size} bytes long but its header needs {8 + header + end}; copy it again")


def _weights_sha256(directory: Path, config: dict[str, Any], memo: Path | None) -> str:
    """Hash over the shards' hashes and the config, since the config decides what the weights compute."""
    known: dict[str, Any] = json.loads(memo.read_text()) if memo and memo.is_file() else {}
    hashes = []
    for shard in weight_shards(directory):
        stat, name = shard.stat(), str(shard.resolve())
        remembered = known.get(name)
        if not remembered or remembered[:2] != [stat.st_size, stat.st_mtime_ns]:
            known[name] = remembered = [stat.st_size, stat.st_mtime_ns, sha256_file(shard)]
        hashes.append(remembered[2])
    if memo:
        write_atomic(memo, json.dumps(known, indent=1))
    cosmetic = {"transformers_version", "_name_or_path"}
    return sha256_json({"shards": hashes, "config": {k: v for k, v in config.items() if k not in cosmetic}})


def _tokenizer_sha256(directory: Path) -> str:
    files = tokenizer_files(directory)
    if not any(path.name == "tokenizer.json" for path in files):
        raise CheckpointError(f"{directory} has no tokenizer.json, so prompts cannot become token ids")
    return sha256_json([[path.name, sha256_file(path)] for path in files])
