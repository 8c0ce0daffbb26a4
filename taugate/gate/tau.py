"""τ, the mean acceptance length, with its interval.

τ = emitted tokens / verification cycles, pooled over prompts. The bonus token of each cycle counts, the token
that the prefill gives does not; the last cycle is cut at the end-of-text token or the length cap. Range
1…block size. `tau_macro` is the mean of the prompts' own τ; `tau_anchors` takes every position as an anchor
instead of the chain. The interval is a bootstrap clustered by prompt: cycles of one prompt are not
independent, and a per-cycle standard error covers a third of what it promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from taugate.drafter.replay import AnchorTable, Verifier, walk
from taugate.errors import EvidenceError
from taugate.gate.interval import Bootstrap, detectable, interval, resample
from taugate.gate.profile import Profile, profile

__all__ = ["Bootstrap", "Measurement", "PromptTau", "detectable_difference", "interval", "measure", "paired_interval"]


@dataclass(frozen=True)
class PromptTau:
    """One prompt's chain: tokens emitted and cycles needed. A completion of one token has no cycle."""

    prompt_id: str
    tokens: int
    cycles: int


@dataclass(frozen=True)
class Measurement:
    """τ of one drafter under one verifier, with interval [low, high] and the two neighbours of τ under
    their names.
    """

    drafter: str
    drafter_sha256: str
    verifier: str
    definition: str
    block_size: int
    tau: float
    low: float
    high: float
    tau_macro: float
    tau_anchors: float
    tokens: int
    cycles: int
    prompts: int
    per_prompt: tuple[PromptTau, ...]
    profile: Profile | None = None
    detectable: float | None = None

    def record(self) -> dict[str, Any]:
        return {"type": "measurement", **asdict(self)}


def measure(
    drafter: str,
    drafter_sha256: str,
    block_size: int,
    tables: Sequence[AnchorTable],
    verifier: Verifier,
    bootstrap: Bootstrap,
) -> Measurement:
    """Walk every table with `verifier` and pool. Raises EvidenceError when no prompt has a cycle."""
    per_prompt, everywhere, places = [], 0, 0
    for table in tables:
        cycles = walk(table, verifier.name)
        if cycles:
            per_prompt.append(PromptTau(table.sequence.prompt_id, sum(c.emitted for c in cycles), len(cycles)))
        for anchor in table.sequence.anchors():
            everywhere += table.emitted(verifier.name, anchor)
            places += 1
    if not per_prompt:
        raise EvidenceError(f"drafter {drafter}: no prompt has a completion of two tokens or more, so there is no τ")
    tokens, cycles = sum(p.tokens for p in per_prompt), sum(p.cycles for p in per_prompt)
    low, high = interval([p.tokens for p in per_prompt], [p.cycles for p in per_prompt], block_size, bootstrap)
    return Measurement(
        drafter=drafter,
        drafter_sha256=drafter_sha256,
        verifier=verifier.name,
        definition=verifier.definition,
        block_size=block_size,
        tau=tokens / cycles,
        low=low,
        high=high,
        tau_macro=sum(p.tokens / p.cycles for p in per_prompt) / len(per_prompt),
        tau_anchors=everywhere / places,
        tokens=tokens,
        cycles=cycles,
        prompts=len(per_prompt),
        per_prompt=tuple(per_prompt),
        profile=profile(tables, verifier.name, block_size),
        detectable=detectable([p.tokens for p in per_prompt], [p.cycles for p in per_prompt], bootstrap),
    )


def paired_interval(candidate: Measurement, reference: Measurement, bootstrap: Bootstrap) -> tuple[float, float, float]:
    """τ(candidate) − τ(reference) on the same resampled prompts: (difference, low, high).

    Raises EvidenceError unless both were measured on the same prompts.
    """
    columns = _paired(candidate, reference)
    difference = candidate.tau - reference.tau
    if len(columns[0]) < 2:
        return difference, 1.0 - reference.block_size, candidate.block_size - 1.0
    return difference, *resample(columns, lambda t, c, s, d: t / c - s / d, bootstrap)


def detectable_difference(candidate: Measurement, reference: Measurement, bootstrap: Bootstrap) -> float | None:
    """The smallest true paired difference that these prompts show 4 times in 5; None below two prompts."""
    tokens, cycles, *theirs = _paired(candidate, reference)
    return detectable(tokens, cycles, bootstrap, (theirs[0], theirs[1]))


def _paired(candidate: Measurement, reference: Measurement) -> tuple[list[int], ...]:
    """Tokens and cycles of both, prompt by prompt."""
    ours = {p.prompt_id: p for p in candidate.per_prompt}
    theirs = {p.prompt_id: p for p in reference.per_prompt}
    if ours.keys() != theirs.keys():
        raise EvidenceError("candidate and reference were measured on different prompts, so they cannot be paired")
    ids = sorted(ours)
    return (
        [ours[i].tokens for i in ids], [ours[i].cycles for i in ids],
        [theirs[i].tokens for i in ids], [theirs[i].cycles for i in ids],
    )  # fmt: skip
