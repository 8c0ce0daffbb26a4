"""One question of the preflight and its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One question and its answer. detail: what was found. remedy: what to do if it is not ok.

    warn: it is ok, and a person should know of it all the same.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    warn: bool = False

    @property
    def word(self) -> str:
        """ok, WARN or RED."""
        return "RED" if not self.ok else "WARN" if self.warn else "ok"

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" + (f" ({self.remedy})" if self.remedy and not self.ok else "")
