"""How long a capture will take, from how long earlier ones of the same target took on the same GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taugate.files import write_atomic
from taugate.target.store import StateIdentity

_KEPT = 5  # runs per target, GPU and kernel path
_CAUTION = 1.25  # prompts of other lengths, a colder page cache
# Where nothing is known: a small model. A large one is measured by its first window.
_LOAD_S, _SEQUENCE_S = 20.0, 0.5


@dataclass(frozen=True)
class Estimate:
    """Seconds that the capture's job is expected to take, and where that comes from."""

    seconds: float
    source: str


class Speeds:
    """speeds.json below the store's `root`: what captures of one identity took, the latest last."""

    def __init__(self, root: Path, identity: StateIdentity, engine: str) -> None:
        self._file = root / "speeds.json"
        what = (identity.weights_sha256[:16], identity.device, identity.kernel_path, identity.dtype, engine)
        self._key = "|".join(what)

    def estimate(self, sequences: int, tokens: int) -> Estimate:
        """For so many sequences with so many tokens in all: the slowest load of the latest runs, their mean rate."""
        runs = self._all().get(self._key, [])
        if not runs:
            return Estimate(_LOAD_S + _SEQUENCE_S * sequences, "assumed, no capture of this target was measured yet")
        rate = sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)
        seconds = _CAUTION * (max(run["load_s"] for run in runs) + tokens / rate)
        return Estimate(seconds, f"from {len(runs)} earlier captures, {rate:.0f} tokens/s")

    def remember(self, done: dict[str, Any]) -> None:
        """Note what a job's last event says; one that had nothing to do says nothing about speed."""
        if done.get("tokens") and done.get("seconds"):
            everything = self._all()
            run = {name: done[name] for name in ("load_s", "tokens", "seconds")}
            everything[self._key] = [*everything.get(self._key, []), run][-_KEPT:]
            write_atomic(self._file, json.dumps(everything, indent=1))

    def _all(self) -> dict[str, list[dict[str, float]]]:
        """A file that is damaged costs only what it remembered."""
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
            return known if isinstance(known, dict) else {}
        except (OSError, json.JSONDecodeError, UnicodeDecodeError):
            return {}
