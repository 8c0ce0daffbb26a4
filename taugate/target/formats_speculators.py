"""speculators' cache: hs_*.safetensors as its vLLM data generation writes them.

    token_ids [S], hidden_states [S, K (+ 1), H]

Slice k is the output of the layer with the k-th id; ids are vLLM's, 0 = embedding, L + 1 = decoder layer L. With
--include-last-layer one more slice follows: the last layer *before* the final norm. Our `final_hidden` is after it, so
the norm is applied here, with the weight of the given checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from taugate.errors import CheckpointError, StoreError
from taugate.target.checkpoint import TargetInfo
from taugate.target.finalnorm import FinalNorm
from taugate.target.formats import Cached, Facts, taps_of
from taugate.target.shards import read_header
from taugate.target.store import FINAL_HIDDEN, tap_name


def read_speculators(file: Path, facts: Facts, target: TargetInfo, norm: FinalNorm) -> Cached:
    """One file as a sequence. Raises StoreError naming the file and what does not fit."""
    import torch
    from safetensors import safe_open

    assert facts.layer_ids is not None
    try:
        there = read_header(file)
    except OSError as error:
        raise StoreError(f"{file} cannot be read ({error.strerror}); fetch it again") from None
    except CheckpointError as error:
        raise StoreError(str(error)) from None
    if absent := {"token_ids", "hidden_states"} - there.keys():
        raise StoreError(f"{file} lacks {', '.join(sorted(absent))}; speculators' hs_*.safetensors have both")
    with safe_open(file, framework="pt") as stream:
        token_ids, hidden = stream.get_tensor("token_ids").flatten(), stream.get_tensor("hidden_states")
    slices = len(facts.layer_ids) + bool(facts.last_slice)
    if hidden.dim() != 3 or hidden.shape[1] != slices:
        raise StoreError(
            f"{file}: hidden_states has shape {list(hidden.shape)}, but {len(facts.layer_ids)} layer ids "
            f"{'and the last slice ' if facts.last_slice else ''}make [S, {slices}, {target.hidden_size}]"
        )
    taps = taps_of(facts.layer_ids, target, 1, file)
    states = {tap_name(tap): hidden[:, slot].to(torch.bfloat16) for slot, tap in enumerate(taps)}
    if facts.last_slice:
        states[tap_name(target.num_layers - 1)] = hidden[:, -1].to(torch.bfloat16)
        states[FINAL_HIDDEN] = norm(hidden[:, -1]).to(torch.bfloat16)
    return Cached(file, tuple(token_ids.tolist()), None, states)
