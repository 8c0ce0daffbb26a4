"""Typed reading of a JSON config: every value is checked where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taugate.errors import CheckpointError


class Fields:
    """Typed reading of a config. Errors name file, key, what was expected and what was found."""

    def __init__(self, sources: list[Mapping[str, Any]], where: str) -> None:
        self.sources, self.where = sources, where

    def get(self, name: str) -> Any:
        return next((source[name] for source in self.sources if source.get(name) is not None), None)

    def fail(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} is {self.get(name)!r}, expected {expected}")

    def need(self, name: str, kind: type = int) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(
                f"{self.where} does not give {name}; it is never derived, so add it as it was in training"
            )
        return self.check(name, kind)

    def check(self, name: str, kind: type) -> Any:
        """The value, or None when it is absent; numbers must be positive."""
        value = self.get(name)
        if value is None:
            return None
        number = kind in (int, float)
        fits = isinstance(value, (int, float) if kind is float else kind) and not (number and isinstance(value, bool))
        if not fits or (number and not (value > 0 or (kind is int and name.endswith("token_id") and value == 0))):
            raise self.fail(name, f"a positive {kind.__name__}" if number else kind.__name__)
        return value
