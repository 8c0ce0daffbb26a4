"""SpecForge's cache: data_*.ckpt and data_*.ckpt.gz as scripts/prepare_hidden_states.py writes them.

    input_ids, loss_mask, hidden_states [1, S, K·H], and for DSpark target_last_hidden_states [1, S, H], after the norm

Taps are joined in the order of the layer ids, which count decoder layers from 0. The files are pickles, and a pickle
can run anything: they are read with torch's loader for tensors only, and whatever holds more is refused.
"""

from __future__ import annotations

import gzip
import io
import pickle
import re
import warnings
import zlib
from pathlib import Path
from typing import Any

from taugate.errors import StoreError
from taugate.target.checkpoint import TargetInfo
from taugate.target.finalnorm import FinalNorm
from taugate.target.formats import Cached, Facts, taps_of
from taugate.target.store import FINAL_HIDDEN, tap_name

_CUT = "is cut, or not what SpecForge writes under such a name; fetch it again"
# What torch's loader says of a name that is not a tensor's: of one to import, to make an object of, or to call.
_FORBIDDEN = re.compile(r"GLOBAL|add_safe_globals|unrecognized function")


def read_specforge(file: Path, facts: Facts, target: TargetInfo, norm: FinalNorm) -> Cached:
    """One file as a sequence; its prompt ends where loss_mask begins. Raises StoreError naming the file."""
    import torch

    assert facts.layer_ids is not None
    data = _read(file)
    if "aux_hidden_state" in data:
        raise StoreError(f"{file} is an EAGLE3 cache (aux_hidden_state); only those for DFlash and DSpark can be read")
    if absent := {"input_ids", "loss_mask", "hidden_states"} - data.keys():
        raise StoreError(f"{file} lacks {', '.join(sorted(absent))}; SpecForge's data_*.ckpt have all three")
    token_ids, mask = data["input_ids"].flatten().tolist(), data["loss_mask"].flatten().bool().tolist()
    joined, taps = data["hidden_states"].flatten(0, -2), taps_of(facts.layer_ids, target, 0, file)
    if joined.shape[-1] != len(taps) * target.hidden_size:
        raise StoreError(
            f"{file}: hidden_states is {joined.shape[-1]} wide, but {len(taps)} layer ids of width "
            f"{target.hidden_size} make {len(taps) * target.hidden_size}"
        )
    if len(mask) != len(token_ids):
        raise StoreError(f"{file}: loss_mask has {len(mask)} positions and input_ids {len(token_ids)}")
    parts = joined.to(torch.bfloat16).split(target.hidden_size, dim=-1)
    states = {tap_name(tap): part for tap, part in zip(taps, parts, strict=True)}
    if "target_last_hidden_states" in data:
        states[FINAL_HIDDEN] = data["target_last_hidden_states"].flatten(0, -2).to(torch.bfloat16)
    return Cached(file, tuple(token_ids), mask.index(True) if any(mask) else None, states)


def _read(file: Path) -> dict[str, Any]:
    import torch

    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        with warnings.catch_warnings(action="ignore"):  # of pickles that torch.save has not written
            data = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise StoreError(f"{file} {_CUT}") from None
    except OSError as error:
        raise StoreError(f"{file} cannot be read ({error.strerror}); fetch it again") from None
    except (RuntimeError, ValueError, KeyError, IndexError, pickle.UnpicklingError) as error:
        if _FORBIDDEN.search(str(error)):
            raise StoreError(f"{file} holds more than tensors and is not loaded: a pickle can run any code") from None
        raise StoreError(f"{file} {_CUT}") from None
    if not isinstance(data, dict) or not all(isinstance(value, torch.Tensor) for value in data.values()):
        raise StoreError(f"{file} is no table of tensors, as SpecForge's data_*.ckpt are")
    if scalar := [name for name in data if name.endswith("hidden_states") and data[name].dim() < 2]:
        raise StoreError(f"{file}: {scalar[0]} has shape {list(data[scalar[0]].shape)}, not [1, S, width]")
    return data
