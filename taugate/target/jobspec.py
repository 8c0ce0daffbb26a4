"""A capture's spec: what it may hold, and whether the target can do it. All of it is known before anything is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taugate.errors import CheckpointError, GpuMemoryError, KernelPathError
from taugate.target import memory
from taugate.target.checkpoint import read_config, text_config
from taugate.target.kernels import PATHS, require_device
from taugate.target.skeleton import needed_depth

DTYPES, DEVICES, ENGINES = ("bfloat16", "float32"), ("auto", "cpu", "cuda"), ("auto", "resident", "streamed")
_CHOICES = {"kernel_path": PATHS, "dtype": DTYPES, "device": DEVICES, "engine": ENGINES, "final_hidden": (True, False)}
_NEEDED = ("model_path", "kernel_path", "dtype", "device", "taps", "sequences")
_MAY = ("final_hidden", "engine", "max_gpu_memory", "threads")


def read_spec(path: Path) -> dict[str, Any]:
    """A capture's spec. Raises CheckpointError if the file is unusable."""
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); --spec names a capture's spec") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no capture spec ({error}); `--help` shows what it holds") from None
    if said := _unusable(spec):
        raise CheckpointError(f"{path} is no capture spec: {said}; `--help` shows what it holds")
    return spec


def check_spec(spec: Mapping[str, Any]) -> None:
    """Check a well-formed spec against the target's config and this machine, without torch unless it asks for "cuda".

    Raises CheckpointError for taps and tokens that the target lacks, KernelPathError for a path or device that cannot
    run here, GpuMemoryError for a ceiling that is no size.
    """
    directory = Path(spec["model_path"])
    text = text_config(read_config(directory))
    layers, vocabulary = text.get("num_hidden_layers"), text.get("vocab_size")
    if type(layers) is int:  # else what is wrong with the config is said by those who need all of it
        needed_depth(layers, spec["taps"], spec.get("final_hidden", True))
    for number, sequence in enumerate(spec["sequences"], 1):
        if type(vocabulary) is int and (outside := [t for t in sequence["token_ids"] if t >= vocabulary]):
            raise CheckpointError(
                f"sequence {number} holds token {outside[0]}, but the vocabulary of {directory} ends at "
                f"{vocabulary - 1}; it was made for another target"
            )
    if memory.parse_limit(spec.get("max_gpu_memory")) == 0:
        raise GpuMemoryError('max_gpu_memory is 0, with which nothing runs; write a size, or "auto" for what is free')
    _check_device(spec["kernel_path"], str(text["model_type"]), spec["device"])


def _check_device(path: str, model_type: str, device: str) -> None:
    if device != "cpu" and (device == "cuda" or path != "torch"):
        import torch

        if not torch.cuda.is_available():
            if device == "cuda":
                raise KernelPathError('the capture is to run on "cuda", but torch finds no GPU; set device to "cpu"')
            device = "cpu"
    require_device(path, model_type, device)


def _unusable(spec: Any) -> str | None:
    """What is wrong with the form of a spec, if anything."""
    if not isinstance(spec, dict):
        return "it is not a JSON object"
    if absent := [name for name in _NEEDED if name not in spec]:
        return f"it lacks {', '.join(absent)}"
    if unknown := sorted(spec.keys() - {*_NEEDED, *_MAY}):
        return f"{', '.join(unknown)} is not part of one"
    for name, choices in _CHOICES.items():
        if name in spec and not any(spec[name] is choice or spec[name] == choice for choice in choices):
            return f"{name} is {spec[name]!r}, not one of {', '.join(map(str, choices))}"
    if not isinstance(spec["taps"], list) or not all(type(tap) is int for tap in spec["taps"]):
        return "taps is not a list of layers"
    threads = spec.get("threads")
    if threads is not None and (type(threads) is not int or threads < 1):
        return f"threads is {threads!r}, not a number of at least 1"
    return _unusable_sequences(spec["sequences"])


def _unusable_sequences(sequences: Any) -> str | None:
    if not isinstance(sequences, list) or not sequences:
        return "sequences is not a list of at least one"
    seen: set[str] = set()
    for number, entry in enumerate(sequences, 1):
        key, ids = (entry.get("key"), entry.get("token_ids")) if isinstance(entry, dict) else (None, None)
        if not isinstance(key, str) or not key or "/" in key or key.startswith("."):
            return f"sequence {number} has no key that can be a file's name"
        if key in seen:
            return f"sequence {number} has the key {key} of an earlier one"
        if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
            return f"sequence {number} has no token_ids, a list of at least one id"
        seen.add(key)
    return None
