"""States captured on this machine: for the shipped pair, for laptops, and to compare a host's states with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from filelock import FileLock

from taugate.drafter.replay import CachedSequence
from taugate.errors import StoreError
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.prompts import Prompt, read_prompts
from taugate.pipeline.remote import PACKAGE
from taugate.target.capture import code_sha256, pick_device
from taugate.target.checkpoint import read_target
from taugate.target.head import write_bundle
from taugate.target.store import FINAL_HIDDEN, StateIdentity, StateStore, tap_name
from taugate.target.worker import run


def shipped_sequences(prompts: Path, completions: Path, max_new_tokens: int) -> list[CachedSequence]:
    """Sequences from a prompts file and a file of completions ({"id", "prompt_ids", "output_ids"} per line).

    Raises StoreError when a prompt has no completion, or one that belongs to another text.
    """
    lines = (json.loads(line) for line in completions.read_text(encoding="utf-8").splitlines())
    known = {line["id"]: line for line in lines}
    sequences = []
    for prompt in read_prompts(prompts):
        entry = known.get(prompt.id)
        if entry is None or entry["text"] != prompt.text:
            raise StoreError(f"{completions} holds no completion of prompt {prompt.id!r} as {prompts.name} words it")
        sequences.append(_sequence(prompt, entry, max_new_tokens))
    return sequences


def _sequence(prompt: Prompt, entry: dict[str, list[int]], max_new_tokens: int) -> CachedSequence:
    ids, output = entry["prompt_ids"], entry["output_ids"][:max_new_tokens]
    return CachedSequence(prompt.id, (*ids, *output), len(ids), len(ids) + max_new_tokens, prompt.tags)


def capture_here(
    model_path: Path,
    sequences: Sequence[CachedSequence],
    taps: Sequence[int],
    root: Path,
    *,
    kernel_path: str = "torch",
    dtype: str = "float32",
    device: str = "cpu",
    say: Callable[[str], None] = lambda _: None,
) -> Dataset:
    """Capture what the store below `root` lacks, with this machine's torch, and return the data set.

    Safe to call from several processes: one captures, the others wait and find it done. Raises CheckpointError,
    KernelPathError.
    """
    target = read_target(model_path)
    where = pick_device(device)
    kept = [
        "torch",
        "transformers",
        *(["flash-linear-attention", "fla-core", "triton"] if kernel_path == "fla" else []),
    ]
    identity = StateIdentity(
        target=target.name,
        weights_sha256=target.weights_sha256,
        tokenizer_sha256=target.tokenizer_sha256,
        dtype=dtype,
        kernel_path=kernel_path,
        device=where if where == "cpu" else _gpu_name(),
        versions={name: metadata.version(name) for name in kept},
        capture_code_sha256=code_sha256(PACKAGE),
    )
    store = StateStore(root, target.name)
    bundle = root / "heads" / f"{target.weights_sha256}.safetensors"
    data = Dataset(target, tuple(sequences), identity, store, bundle)
    names = [*map(tap_name, taps), FINAL_HIDDEN]
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "producing.lock"):
        if not bundle.is_file():
            write_bundle(model_path, bundle)
        missing = [s for s in sequences if store.missing(data.key(s), names)]
        if missing:
            _produce(model_path, missing, data, sorted(taps), where, say)
    return data


def _produce(
    model_path: Path,
    missing: Sequence[CachedSequence],
    data: Dataset,
    taps: list[int],
    device: str,
    say: Callable[[str], None],
) -> None:
    spec = {
        "model_path": str(model_path),
        "kernel_path": data.identity.kernel_path,
        "dtype": data.identity.dtype,
        "device": device,
        "taps": taps,
        "sequences": [{"key": data.key(s), "token_ids": list(s.token_ids)} for s in missing],
    }
    with tempfile.TemporaryDirectory(dir=data.store.root.parent.parent) as scratch:
        for event in run(spec, Path(scratch)):
            if event["event"] == "state" and event["done"] % 16 == 0:
                say(f"captured {event['done']}/{event['of']} sequences here, {event['left_s']:.0f} s left")
        for sequence in missing:
            key = data.key(sequence)
            provenance = {"host": "this machine", "kernels": event["kernels"], "device": event["device"]}
            data.store.adopt(
                key,
                Path(scratch) / f"{key}.safetensors",
                data.identity.fields(sequence.token_ids),
                provenance,
            )


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()
