"""Hidden states that other tools cached, read into the store.

    python -m taugate.target.formats speculators hs_*.safetensors --model DIR --layer-ids 2,17,32 …
    python -m taugate.target.formats specforge rows_*/data_*.ckpt.gz --model DIR --layer-ids 1,16,31 …

Neither format records which model, layers, precision, engine and GPU its numbers come from. They decide what a state
is, so they must be given; what is missing is asked for in one sentence. Layer ids are as the tool itself writes them:
speculators and vLLM count from the embedding (id L + 1 is the output of decoder layer L), SpecForge counts layers from
0. Imported states have an identity of their own and are never mistaken for captured ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.command import Parser, one_sentence
from taugate.errors import StoreError
from taugate.files import sha256_file, sha256_json, write_atomic
from taugate.target.checkpoint import TargetInfo, find_checkpoint, read_target
from taugate.target.finalnorm import FinalNorm
from taugate.target.store import StateIdentity, StateStore

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Facts:
    """What the files do not say, None where it was not given.

    model: the target's checkpoint. layer_ids: as the tool writes them, in the file's order. dtype: of the forward.
    engine, version: what computed the states, "vllm" "0.11.0". gpu: its name. last_slice (speculators): whether the
    last slice is the last layer's raw output, as --include-last-layer makes it.
    """

    model: str | None = None
    layer_ids: tuple[int, ...] | None = None
    dtype: str | None = None
    engine: str | None = None
    version: str | None = None
    gpu: str | None = None
    last_slice: bool | None = None

    def require(self, names: Sequence[str], files: str) -> None:
        """Raise StoreError naming every one of `names` that was not given."""
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            options = ", ".join(f"--{name.replace('_', '-')} ({_MEANING[name]})" for name in missing)
            raise StoreError(f"{files} do not say where their numbers come from: give {options}")


_MEANING = {
    "model": "the target's checkpoint",
    "layer_ids": "ids of the tapped layers, in the file's order",
    "dtype": "precision of the forward",
    "engine": "what computed them, such as vllm",
    "version": "the engine's version",
    "gpu": "name of the GPU",
    "last_slice": "yes if the last slice is the last layer before the final norm, no if it is a tap like the others",
}
ALWAYS = ("model", "layer_ids", "dtype", "engine", "version", "gpu")


@dataclass(frozen=True)
class Cached:
    """One sequence of a public cache: `states` by our names, [S, H] in bfloat16.

    prompt_length: position of the first supervised token, None where the file does not tell.
    """

    file: Path
    token_ids: tuple[int, ...]
    prompt_length: int | None
    states: Mapping[str, Tensor]


Reader = Callable[[Path, Facts, TargetInfo, FinalNorm], Cached]


def identity(format: str, facts: Facts, target: TargetInfo) -> StateIdentity:
    """Identity of imported states: the facts as they were given, and the reader in place of the capture's code."""
    return StateIdentity(
        target=target.name,
        weights_sha256=target.weights_sha256,
        tokenizer_sha256=target.tokenizer_sha256,
        dtype=str(facts.dtype),
        kernel_path=str(facts.engine),
        device=str(facts.gpu),
        versions={str(facts.engine): str(facts.version)},
        capture_code_sha256=sha256_json({"import": format, "reader": 1}),
    )


def import_files(format: str, files: Sequence[Path], facts: Facts, root: Path) -> Iterator[dict[str, Any]]:
    """Read `files` into the store below `root`; yields {"event": "imported", "file", "key", …} for each, and "done".

    A manifest imports/<hash>.json lists them with their prompt lengths. Raises StoreError naming the file and what is
    wrong, CheckpointError for an unusable checkpoint. What was imported before an error stays.
    """
    reader, needed = _reader(format)
    facts.require(needed, f"{format} files")
    directory = find_checkpoint(str(facts.model))
    target = read_target(directory, root / "hashes.json")
    norm, who = FinalNorm(directory), identity(format, facts, target)
    store, entries = StateStore(root, target.name), []
    for number, file in enumerate(files, 1):
        cached = reader(file, facts, target, norm)
        _check(cached, target)
        key = who.key(cached.token_ids)
        _adopt(store, key, cached, who, format)
        entries.append({"file": file.name, "key": key, "tokens": len(cached.token_ids), "names": sorted(cached.states),
                        "prompt_length": cached.prompt_length})  # fmt: skip
        yield {"event": "imported", "done": number, "of": len(files), **entries[-1]}
    given = {field.name: getattr(facts, field.name) for field in fields(facts)}
    manifest = {"format": format, "facts": given, "target": target.to_json(), "entries": entries}
    path = root / "imports" / f"{sha256_json(manifest)[:16]}.json"
    write_atomic(path, json.dumps(manifest, indent=1))
    yield {"event": "done", "imported": len(entries), "store": str(store.root), "manifest": str(path)}


def _reader(format: str) -> tuple[Reader, tuple[str, ...]]:
    if format == "speculators":
        from taugate.target.formats_speculators import read_speculators

        return read_speculators, (*ALWAYS, "last_slice")
    from taugate.target.formats_specforge import read_specforge

    return read_specforge, ALWAYS


def _check(cached: Cached, target: TargetInfo) -> None:
    """What must hold whatever the format. Raises StoreError naming the file."""
    import torch

    if not all(type(token) is int for token in cached.token_ids):
        raise StoreError(f"{cached.file} holds tokens that are no whole numbers; fetch it again")
    outside = [token for token in cached.token_ids if not 0 <= token < target.vocab_size]
    if not cached.token_ids or outside:
        said = f"holds token {outside[0]}" if outside else "holds no token"
        raise StoreError(f"{cached.file} {said}; the vocabulary of {target.name} has {target.vocab_size}")
    for name, value in cached.states.items():
        if tuple(value.shape) != (len(cached.token_ids), target.hidden_size):
            raise StoreError(
                f"{cached.file}: {name} has shape {list(value.shape)}, but {len(cached.token_ids)} tokens of "
                f"{target.name} are {[len(cached.token_ids), target.hidden_size]}"
            )
        if not torch.isfinite(value).all():
            raise StoreError(f"{cached.file}: {name} is not finite; leave the file out")


def _adopt(store: StateStore, key: str, cached: Cached, who: StateIdentity, format: str) -> None:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "states.safetensors"
        save_file({name: value.contiguous() for name, value in cached.states.items()}, file)
        origin = {"format": format, "file": cached.file.name, "sha256": sha256_file(cached.file)}
        store.adopt(key, file, who.fields(cached.token_ids), {"imported": origin})


def taps_of(layers: Sequence[int], target: TargetInfo, shift: int, file: Path) -> list[int]:
    """Decoder layers (0-based) of ids that count from `shift`. Raises StoreError for one that the target lacks."""
    taps = [layer - shift for layer in layers]
    if len(set(taps)) != len(taps) or any(not 0 <= tap < target.num_layers for tap in taps):
        first = f"{shift}…{target.num_layers - 1 + shift}"
        raise StoreError(f"{file}: layer ids {list(layers)} are not different ids of the target's layers {first}")
    return taps


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m taugate.target.formats", description=__doc__)
    parser.add_argument("format", choices=("speculators", "specforge"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--store", type=Path, default=Path(".taugate"), help="default: %(default)s")
    parser.add_argument("--model", help=_MEANING["model"])
    parser.add_argument("--layer-ids", help=_MEANING["layer_ids"] + ": 2,17,32")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help=_MEANING["dtype"])
    parser.add_argument("--engine", help=_MEANING["engine"])
    parser.add_argument("--version", help=_MEANING["version"])
    parser.add_argument("--gpu", help=_MEANING["gpu"])
    parser.add_argument("--last-slice", choices=("yes", "no"), help="speculators: " + _MEANING["last_slice"])
    args = parser.parse_args(argv)
    try:
        layers = None if args.layer_ids is None else tuple(int(part) for part in args.layer_ids.split(","))
    except ValueError:
        parser.error(f"--layer-ids {args.layer_ids!r} is no list such as 2,17,32")
    last = None if args.last_slice is None else args.last_slice == "yes"
    facts = Facts(args.model, layers, args.dtype, args.engine, args.version, args.gpu, last)

    def read() -> int:
        for event in import_files(args.format, args.files, facts, args.store):
            print(json.dumps(event), flush=True)
        return 0

    return one_sentence(read)


if __name__ == "__main__":
    sys.exit(main())
