"""What a window is asked to do, and what is written down about it."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from taugate.host.sglang import Generation, ServerIdentity


class Phase(enum.Enum):
    """Where a window is. SERVING is both its beginning and its end."""

    SERVING = "serving"
    LEASED = "leased"
    STOPPED = "stopped"
    FREE = "free"
    HELD = "held"
    STARTING = "starting"
    BROKEN = "broken"


def new_window_id() -> str:
    """A readable id that no other window has: UTC time and four random bytes."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + os.urandom(4).hex()


@dataclass(frozen=True)
class WindowSettings:
    """All times in seconds.

    canary_input_ids: token ids of a prompt whose greedy continuation (canary_tokens long) is taken before the
    stop and compared after the start; required. ttl_s: the host restores the server when nothing was heard
    from us for this long. stop_timeout_s None: the unit's own TimeoutStopSec and 30 s more (600 s if it has
    none). verify_requests: real generations that must succeed before the server counts as serving again.
    request_timeout_s: what one of these, or the canary, may take. persist_s: how long a step of the restore
    is tried again when the host does not answer or refuses. drain_s: how long to wait, before the stop, until
    the server has no requests; 0 = stop at once. on_busy: what to do when it still has some then. notify,
    webhook: who is told that the server did not come back (see notify.py).
    """

    canary_input_ids: tuple[int, ...]
    canary_tokens: int = 16
    verify_requests: int = 4
    ttl_s: float = 600.0
    stop_timeout_s: float | None = None
    free_timeout_s: float = 120.0
    escalate_after_s: float = 30.0
    start_timeout_s: float = 900.0
    request_timeout_s: float = 120.0
    persist_s: float = 120.0
    drain_s: float = 0.0
    on_busy: Literal["stop", "give up"] = "stop"
    poll_s: float = 0.5
    window_id: str = field(default_factory=new_window_id)
    owner: str | None = None
    notify: tuple[str, ...] = ()
    webhook: str | None = None


@dataclass(frozen=True)
class PhaseEvent:
    """A phase was reached `seconds` after the window was opened; at_iso: UTC."""

    phase: Phase
    at_iso: str
    seconds: float
    detail: str


@dataclass
class WindowRecord:
    """The story of one window; it grows while the window lives.

    outcome: "" while open, then "restored" (it serves again) or "broken" (a person must look). downtime_s:
    from the stop command to the last verified request, None if it was never stopped. lease_lost: "" or why
    the window was not exclusive to its end. error: "" or the sentence that made it broken.
    fingerprint: how many "fields" of the server were compared with those before the stop, and which "differ".
    """

    window_id: str
    host: str
    service: str
    outcome: str = ""
    phases: list[PhaseEvent] = field(default_factory=list)
    downtime_s: float | None = None
    start_s: float | None = None
    escalations: list[str] = field(default_factory=list)
    canary: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    gpus_before_mib: dict[str, int] = field(default_factory=dict)
    gpus_after_mib: dict[str, int] = field(default_factory=dict)
    identity_before: ServerIdentity | None = None
    identity_after: ServerIdentity | None = None
    lease_lost: str = ""
    error: str = ""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; phases by their names in lower case."""
        value = asdict(self)
        for event in value["phases"]:
            event["phase"] = event["phase"].value
        return value


class Journal:
    """Writes phases into a record and tells `on_event`, whose exceptions are noted and go no further."""

    def __init__(
        self, record: WindowRecord, on_event: Callable[[PhaseEvent], None] | None, clock: Callable[[], float]
    ) -> None:
        self.phase = Phase.SERVING
        self.record, self._on_event, self._clock = record, on_event, clock
        self._begun = clock()

    def begin(self) -> None:
        """Start counting seconds now."""
        self._begun = self._clock()

    def event(self, phase: Phase, detail: str) -> None:
        self.phase = phase
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        event = PhaseEvent(phase, now, self._clock() - self._begun, detail)
        self.record.phases.append(event)
        if self._on_event:
            try:
                self._on_event(event)
            except Exception as error:
                self.record.notes.append(f"on_event failed at {phase.value}: {error!r}")


def compare_canary(before: Generation, after: Generation) -> dict[str, Any]:
    """Compare two greedy continuations of the same prompt.

    first_difference: index of the first differing token (or where one ends), None if they are the same.
    top2_margin: log-probability gap (nats) between the two best tokens there, before the stop; None if
    unknown.
    """
    same = before.output_ids == after.output_ids
    first = margin = None
    if not same:
        pairs = enumerate(zip(before.output_ids, after.output_ids, strict=False))
        shorter = min(len(before.output_ids), len(after.output_ids))
        first = next((index for index, (old, new) in pairs if old != new), shorter)
        if first < len(before.top_logprobs) and len(before.top_logprobs[first]) >= 2:
            best, second = sorted((logprob for logprob, _ in before.top_logprobs[first]), reverse=True)[:2]
            margin = best - second
    return {
        "same": same,
        "first_difference": first,
        "top2_margin": margin,
        "before": list(before.output_ids),
        "after": list(after.output_ids),
    }
