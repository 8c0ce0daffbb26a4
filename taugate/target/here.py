"""Capture on this machine into a store: the identity of what this machine computes, and only what the store lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import taugate
from taugate.errors import StoreError
from taugate.target.capture import code_sha256, pick_device
from taugate.target.checkpoint import TargetInfo, find_checkpoint, read_target
from taugate.target.jobspec import check_spec
from taugate.target.probe import installed_versions
from taugate.target.results import Results, wanted_names
from taugate.target.store import StateIdentity, StateStore
from taugate.target.worker import run

PACKAGE = Path(taugate.__file__).resolve().parent
LOCK = "producing.lock"


@dataclass(frozen=True)
class Wanted:
    """What to capture: taps by layer and, unless told otherwise, final_hidden. options: see `taugate.target.worker`."""

    kernel_path: str
    dtype: str
    device: str
    taps: tuple[int, ...]
    final_hidden: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, model_path: Path, device: str, keyed: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """A job's spec for token ids by key."""
        return {
            "model_path": str(model_path),
            "kernel_path": self.kernel_path,
            "dtype": self.dtype,
            "device": device,
            "taps": list(self.taps),
            "final_hidden": self.final_hidden,
            **self.options,
            "sequences": [{"key": key, "token_ids": list(ids)} for key, ids in keyed.items()],
        }


def relevant_versions(kernel_path: str, versions: Mapping[str, str]) -> dict[str, str]:
    """Of all versions, those of the packages that decide a state's numbers."""
    kernels = ("flash-linear-attention", "fla-core", "triton") if kernel_path == "fla" else ()
    return {name: versions[name] for name in ("torch", "transformers", *kernels) if name in versions}


def identity_here(target: TargetInfo, wanted: Wanted, device: str) -> StateIdentity:
    """The identity of states that this machine would compute on `device` ("cpu" or "cuda")."""
    return StateIdentity(
        target=target.name,
        weights_sha256=target.weights_sha256,
        tokenizer_sha256=target.tokenizer_sha256,
        dtype=wanted.dtype,
        kernel_path=wanted.kernel_path,
        device=device if device == "cpu" else _gpu_name(),
        versions=relevant_versions(wanted.kernel_path, installed_versions()),
        capture_code_sha256=code_sha256(PACKAGE),
    )


def capture_into_store(
    model: str | Path, sequences: Sequence[Sequence[int]], wanted: Wanted, root: Path
) -> Iterator[dict[str, Any]]:
    """Capture what the store below `root` lacks, and yield the worker's events; the last one is "done".

    One process captures, the others say so ({"event": "waiting", "sentence"}), wait, and find it done. Files of a run
    that was killed are taken up. Raises CheckpointError, KernelPathError, GpuMemoryError before the weights are hashed,
    JobError and StoreError later.
    """
    directory = find_checkpoint(model)
    numbered = {str(number): ids for number, ids in enumerate(sequences)}
    check_spec(wanted.spec(directory, wanted.device, numbered))
    root.mkdir(parents=True, exist_ok=True)
    target = read_target(directory, root / "hashes.json")
    device = pick_device(wanted.device)
    identity, store = identity_here(target, wanted, device), StateStore(root, target.name)
    with ExitStack() as stack:
        lock = FileLock(root / LOCK)
        try:
            stack.enter_context(lock.acquire(timeout=0))
        except Timeout:
            yield {"event": "waiting", "sentence": f"another process captures into {root}; waiting for its end"}
            stack.enter_context(lock.acquire())
        keyed = {identity.key(ids): ids for ids in sequences}
        spec = wanted.spec(directory, device, keyed)
        names = wanted_names(spec)
        spec["sequences"] = [s for s in spec["sequences"] if store.missing(s["key"], names)]
        for sequence in spec["sequences"]:
            store.verify(sequence["key"])  # taps are added to what is whole, and nothing is computed for what is not
        have = len(keyed) - len(spec["sequences"])
        if not spec["sequences"]:
            yield {"event": "done", "captured": 0, "stored": have, "store": str(store.root)}
            return
        results, done = Results(root / "captures"), {}
        for done in run(spec, results.directory):
            if done["event"] != "done":
                yield done
        adopt_results(store, identity, keyed, results, done["files"], {"host": "this machine"})
        yield {"event": "done", "captured": len(spec["sequences"]), "stored": len(keyed), "store": str(store.root)}


def adopt_results(
    store: StateStore,
    identity: StateIdentity,
    keyed: Mapping[str, Sequence[int]],
    results: Results,
    files: Mapping[str, Mapping[str, Any]],
    origin: Mapping[str, Any],
    each: Callable[[int], None] = lambda number: None,
) -> None:
    """Move complete results into the store; `origin` and what the result says of itself become its provenance."""
    for number, (key, record) in enumerate(files.items(), 1):
        provenance = {**origin, **{name: record[name] for name in ("kernels", "engine", "device")}}
        store.adopt(key, results.file(key), identity.fields(keyed[key]), provenance)
        results.forget(key)
        each(number)


def read_sequences(path: Path) -> list[list[int]]:
    """Token ids from JSON lines. Raises StoreError naming the line of what is unusable."""
    sequences = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}); --sequences names a file of JSON lines") from None
    except UnicodeDecodeError:
        raise StoreError(f"{path} is not text; --sequences names a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            ids = entry["token_ids"] if "token_ids" in entry else [*entry["prompt_ids"], *entry["output_ids"]]
        except (json.JSONDecodeError, KeyError, TypeError):
            ids = None
        if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
            raise StoreError(f"{path} line {number}: needs token_ids, or prompt_ids and output_ids, as lists of ids")
        sequences.append(ids)
    if not sequences:
        raise StoreError(f"{path} holds no sequence; write one JSON object with token_ids a line")
    return sequences


def _gpu_name() -> str:
    import torch

    return "+".join(sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}))
