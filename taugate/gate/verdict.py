"""From numbers to a verdict: pass, fail or inconclusive, each with one sentence. Only pass promotes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from taugate.gate.fidelity import Fidelity
from taugate.gate.tau import Bootstrap, Measurement, detectable_difference, paired_interval

Outcome = Literal["pass", "fail", "inconclusive"]
SUSPICIOUS_CYCLES = 30  # fewer full blocks in a row may be luck on easy text


@dataclass(frozen=True)
class Verdict:
    """What a gate decided.

    `drafter_sha256` is the checkpoint it is about, whatever its directory is called.
    """

    gate: str
    outcome: Outcome
    sentence: str
    drafter: str
    drafter_sha256: str

    def record(self) -> dict[str, Any]:
        return {"type": "verdict", **asdict(self)}


def threshold_verdict(m: Measurement, min_tau: float, min_prompts: int) -> Verdict:
    """pass: low ≥ threshold. fail: high < threshold, or an implausible τ.

    Else, and below `min_prompts`, inconclusive.
    """
    seen = f"τ({m.verifier}) of {m.drafter} is {m.tau:.3f} [{m.low:.3f}, {m.high:.3f}] over {m.prompts} prompts"
    wanted = f"min_tau is {min_tau:g}"
    if why := implausible(m):
        return Verdict(f"{m.drafter} {m.verifier} min_tau", "fail", f"{seen}; {why}", m.drafter, m.drafter_sha256)
    if m.prompts < min_prompts:
        outcome, why = "inconclusive", f"{wanted}, and fewer than min_prompts = {min_prompts} prompts decide nothing"
    elif m.low >= min_tau:
        outcome, why = "pass", f"{wanted}: the low end reaches it"
    elif m.high < min_tau:
        outcome, why = "fail", f"{wanted}: even the high end is below it"
    else:
        outcome, why = "inconclusive", f"{wanted} lies inside the interval; {_more(m.detectable)}"
    return Verdict(f"{m.drafter} {m.verifier} min_tau", outcome, f"{seen}; {why}", m.drafter, m.drafter_sha256)


def implausible(m: Measurement) -> str | None:
    """Why a τ cannot be believed however well it is measured, or None.

    topk is an upper bound, so it may be perfect.
    """
    seen = m.profile
    if m.verifier.startswith("topk") or seen is None or seen.full < seen.whole or seen.whole < SUSPICIOUS_CYCLES:
        return None
    return (
        f"every one of {seen.whole} whole cycles emitted a full block of {m.block_size}, which no drafter"
        " does on held-out "
        "text: a state reaches its own slot, or these prompts were trained on"
    )


def _more(smallest: float | None) -> str:
    seen = f" ({smallest:.3f} is the smallest difference that these would show 4 times in 5)" if smallest else ""
    return f"measure more prompts{seen}"


def reference_verdict(
    m: Measurement, reference: Measurement, margin: float, min_prompts: int, bootstrap: Bootstrap
) -> Verdict:
    """Paired by prompt. pass: low of the difference ≥ −margin. fail: its high < −margin.

    Else inconclusive.
    """
    difference, low, high = paired_interval(m, reference, bootstrap)
    seen = (
        f"τ({m.verifier}) of {m.drafter} minus {reference.drafter} is {difference:+.3f} [{low:+.3f},"
        f" {high:+.3f}] "
        f"over {m.prompts} prompts"
    )
    wanted = f"max_loss_to_reference is {margin:g}"
    if m.prompts < min_prompts:
        outcome, why = "inconclusive", f"{wanted}, and fewer than min_prompts = {min_prompts} prompts decide nothing"
    elif low >= -margin:
        outcome, why = "pass", f"{wanted}: the low end stays within it"
    elif high < -margin:
        outcome, why = "fail", f"{wanted}: even the high end loses more"
    else:
        outcome = "inconclusive"
        why = f"{wanted} lies inside the interval; {_more(detectable_difference(m, reference, bootstrap))}"
    return Verdict(
        f"{m.drafter} {m.verifier} against reference", outcome, f"{seen}; {why}", m.drafter, m.drafter_sha256
    )


def fidelity_verdict(drafter: str, drafter_sha256: str, fidelity: Fidelity, min_on_policy: float) -> Verdict:
    """Whether the states belong to the completions at all; if not, no τ computed from them is to be
    believed.
    """
    seen = (
        f"{fidelity.rate:.4f} of {fidelity.decided} cached tokens are what the captured states predict "
        f"(near ties left out: {fidelity.near_tie_share:.2%})"
    )
    if fidelity.decided and fidelity.rate >= min_on_policy:
        outcome, why = "pass", f"min_on_policy is {min_on_policy:g}"
    else:
        outcome, why = "fail", f"min_on_policy is {min_on_policy:g}: these states do not belong to these completions"
    return Verdict("on-policy rate", outcome, f"{seen}; {why}", drafter, drafter_sha256)
