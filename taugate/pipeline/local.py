"""States captured on this machine: for the shipped pair, for laptops, and to compare a host's states with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from taugate.drafter.replay import CachedSequence
from taugate.errors import StoreError
from taugate.pipeline.bar import CaptureBar, Say
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.prompts import Prompt, read_prompts
from taugate.target.capture import pick_device
from taugate.target.checkpoint import read_target
from taugate.target.head import HeadStore
from taugate.target.here import LOCK, Wanted, capture_into_store, identity_here
from taugate.target.store import StateStore


def shipped_sequences(prompts: Path, completions: Path, max_new_tokens: int) -> list[CachedSequence]:
    """Sequences from a prompts file and a file of completions ({"id", "prompt_ids", "output_ids"} per line).

    Raises StoreError when a prompt has no completion, or one that belongs to another text, or the file cannot be read.
    """
    try:
        lines = (json.loads(line) for line in completions.read_text(encoding="utf-8").splitlines())
        known = {line["id"]: line for line in lines}
    except OSError as error:
        raise StoreError(f"{completions} cannot be read ({error.strerror}); name the file of completions") from None
    except (ValueError, KeyError, TypeError):
        raise StoreError(
            f"{completions} is no file of completions: each line is a JSON object with id, text, prompt_ids, output_ids"
        ) from None
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
    say: Say = lambda _: None,
) -> Dataset:
    """Capture what the store below `root` lacks, with this machine's torch, and return the data set.

    Safe to call from several processes: one captures, the others wait and find it done. Raises CheckpointError,
    KernelPathError, JobError.
    """
    target = read_target(model_path)
    wanted = Wanted(kernel_path, dtype, device, tuple(sorted(taps)))
    identity, store = identity_here(target, wanted, pick_device(device)), StateStore(root, target.name)
    heads = HeadStore(root)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / LOCK):
        heads.produce(model_path, target.weights_sha256)
    bar = CaptureBar(say)
    for event in capture_into_store(model_path, [s.token_ids for s in sequences], wanted, root):
        bar(event)
    return Dataset(target, tuple(sequences), identity, store, heads)
