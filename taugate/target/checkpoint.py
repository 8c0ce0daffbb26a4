"""A target checkpoint as the host sees it: where it lies, what its config says, which content it has. No weights."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taugate.errors import CheckpointError
from taugate.files import sha256_file, sha256_json, write_atomic
from taugate.target.shards import read_tensors, shard_files

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3", "llama")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_HASHED_AT_ONCE = 4  # shards; hashing gives the interpreter free, and one core hashes slower than a disk reads

Progress = Callable[[dict[str, Any]], None]


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


def find_checkpoint(name: str | Path) -> Path:
    """The directory that holds config.json: `name` itself, the snapshot of a directory models--ORG--NAME, or that of
    ORG/NAME in a Hugging Face cache of this machine ($HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub).

    Raises CheckpointError naming what was looked at.
    """
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    if (path / "snapshots").is_dir():
        return _snapshot(path)
    if path.is_dir():
        raise CheckpointError(f"there is no target checkpoint at {path}: config.json is missing; set target.path")
    parts = str(name).split("/")
    if len(parts) == 2 and all(parts):
        caches = _hub_caches()
        for cache in caches:
            if (cache / f"models--{parts[0]}--{parts[1]}" / "snapshots").is_dir():
                return _snapshot(cache / f"models--{parts[0]}--{parts[1]}")
        looked = ", ".join(str(cache) for cache in caches)
        raise CheckpointError(f"there is no target checkpoint {name}, nor one in {looked}; set target.path")
    what = "it is a file, not a directory" if path.exists() else "it does not exist"
    raise CheckpointError(f"there is no target checkpoint at {path}: {what}; set target.path")


def read_target(directory: Path, memo: Path | None = None, progress: Progress = lambda _: None) -> TargetInfo:
    """Read config and content hashes of the checkpoint in `directory` (see `find_checkpoint`).

    memo: file in which the hashes of shards are remembered by size and mtime. progress gets {"event": "hashing",
    "file", "done_bytes", "of_bytes", "left_s"} after each chunk of about a second. Raises CheckpointError naming the
    file that is missing or unusable.
    """
    config = read_config(directory)
    text = text_config(config)
    read_tensors(directory)  # every header, before an hour may go into hashes
    try:
        eos = text.get("eos_token_id", config.get("eos_token_id"))
        return TargetInfo(
            name=_readable_name(directory),
            model_type=text["model_type"],
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
            tied_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            weights_sha256=_weights_sha256(directory, config, memo, progress),
            tokenizer_sha256=_tokenizer_sha256(directory),
        )
    except KeyError as error:
        raise CheckpointError(f"{directory / 'config.json'} lacks {error.args[0]}; copy the checkpoint again") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory / 'config.json'} holds something else than a number ({error}); copy the checkpoint again"
        ) from None


def read_config(directory: Path) -> dict[str, Any]:
    """config.json. Raises CheckpointError if it is missing, unreadable, quantized or of no supported family."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"there is no target checkpoint at {directory}: {path.name} is missing; set target.path")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy the checkpoint again") from None
    if not isinstance(config, dict) or not isinstance(text_config(config), dict):
        raise CheckpointError(f"{path} is not a JSON object; copy the checkpoint again")
    model_type = text_config(config).get("model_type", "")
    if str(model_type).removesuffix("_text") not in FAMILIES:
        raise CheckpointError(f"{path} is of model_type {model_type!r}; supported families are {', '.join(FAMILIES)}")
    if "quantization_config" in config:
        given = config["quantization_config"]
        method = given.get("quant_method", "unknown") if isinstance(given, dict) else "unknown"
        raise CheckpointError(f"{path} is of a quantized checkpoint ({method}); capture from the unquantized one")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the text model: all of it, or `text_config` of a multimodal class."""
    return config.get("text_config") or config


def tokenizer_files(directory: Path) -> list[Path]:
    """The files that decide how text becomes token ids, those that exist."""
    return [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]


def _hub_caches() -> list[Path]:
    named = [os.environ.get("HF_HUB_CACHE"), os.environ.get("HF_HOME") and f"{os.environ['HF_HOME']}/hub"]
    return [Path(path).expanduser() for path in [*named, "~/.cache/huggingface/hub"] if path]


def _snapshot(repository: Path) -> Path:
    """The snapshot that refs/main names, or the only one."""
    main, snapshots = repository / "refs" / "main", sorted((repository / "snapshots").iterdir())
    if not snapshots:
        raise CheckpointError(f"{repository} holds no snapshot: the download is incomplete; download it again")
    if main.is_file():
        snapshot = repository / "snapshots" / main.read_text().strip()
        if not snapshot.is_dir():
            raise CheckpointError(f"{main} names the snapshot {snapshot.name}, which is missing; download it again")
    elif len(snapshots) == 1:
        snapshot = snapshots[0]
    else:
        raise CheckpointError(
            f"{repository} holds {len(snapshots)} snapshots and no refs/main; set target.path to one of them"
        )
    if not (snapshot / "config.json").is_file():
        raise CheckpointError(f"{snapshot} lacks config.json: the download is incomplete; download it again")
    return snapshot


def _readable_name(directory: Path) -> str:
    """Name for people: of a snapshot it is the repository's."""
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return directory.absolute().name


def _weights_sha256(directory: Path, config: dict[str, Any], memo: Path | None, progress: Progress) -> str:
    """Hash over the shards' hashes and the config, since the config decides what the weights compute."""
    cosmetic = {"transformers_version", "_name_or_path"}
    shards = _shard_hashes(shard_files(directory), memo, progress)
    return sha256_json({"shards": shards, "config": {k: v for k, v in config.items() if k not in cosmetic}})


def _shard_hashes(shards: Sequence[Path], memo: Path | None, progress: Progress) -> list[str]:
    """SHA-256 of each shard. One that is remembered is not read again; a new one is remembered at once."""
    known = _remembered(memo)
    todo = [shard for shard in shards if known.get(str(shard.resolve()), [])[:2] != _stamp(shard)]
    meter = _Meter(sum(shard.stat().st_size for shard in todo), progress)

    def hashed(shard: Path) -> tuple[Path, list[int], str]:
        before = _stamp(shard)
        digest = sha256_file(shard, lambda count: meter.add(shard.name, count))
        if _stamp(shard) != before:
            raise CheckpointError(f"{shard} changed while it was read; wait until it is written, then run again")
        return shard, before, digest

    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        for shard, stamp, digest in pool.map(hashed, todo):
            known[str(shard.resolve())] = [*stamp, digest]
            if memo:
                write_atomic(memo, json.dumps(known, indent=1))
    return [known[str(shard.resolve())][2] for shard in shards]


def _stamp(shard: Path) -> list[int]:
    stat = shard.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _remembered(memo: Path | None) -> dict[str, Any]:
    """A memo that is damaged is only a memo: everything is hashed again."""
    try:
        known = json.loads(memo.read_text()) if memo and memo.is_file() else {}
    except ValueError:
        return {}
    entries = known.items() if isinstance(known, dict) else ()
    return {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 3}


class _Meter:
    """Adds up bytes from several threads and reports about once a second."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self.progress, self.done = total, progress, 0
        self.start = self.said = time.monotonic()

    def add(self, file: str, count: int) -> None:
        self.done += count  # reports only: an update lost between threads does no harm
        now = time.monotonic()
        if now - self.said >= 1.0:
            self.said = now
            left = (now - self.start) / self.done * (self.total - self.done)
            self.progress(
                {"event": "hashing", "file": file, "done_bytes": self.done, "of_bytes": self.total,
                 "left_s": round(left, 1)}
            )  # fmt: skip


def _tokenizer_sha256(directory: Path) -> str:
    files = tokenizer_files(directory)
    if not any(path.name == "tokenizer.json" for path in files):
        raise CheckpointError(f"{directory} has no tokenizer.json, so prompts cannot become token ids; copy it there")
    try:
        json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / 'tokenizer.json'} is not valid JSON ({error}); copy it again") from None
    return sha256_json([[path.name, sha256_file(path)] for path in files])
