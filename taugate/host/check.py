"""One question of the preflight and its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One question and its answer. detail: what was found. remedy: what to do if it is not ok."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" + (f" ({self.remedy})" if self.remedy and not self.ok else "")
