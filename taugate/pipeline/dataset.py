"""A data set: sequences, where their states are, and the target's embedding and head. All that a replay needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from taugate.drafter.replay import CachedSequence
from taugate.target.checkpoint import TargetInfo
from taugate.target.head import HeadStore
from taugate.target.store import StateIdentity, StateStore


@dataclass(frozen=True)
class Dataset:
    """States are looked up by content, and so are the target's embedding and head."""

    target: TargetInfo
    sequences: tuple[CachedSequence, ...]
    identity: StateIdentity
    store: StateStore
    heads: HeadStore

    def key(self, sequence: CachedSequence) -> str:
        return self.identity.key(sequence.token_ids)

    def states(self, sequence: CachedSequence, names: Sequence[str]) -> dict[str, Any]:
        """Tensors [S, H] by name. Raises StoreError for missing or damaged ones."""
        return self.store.load(self.key(sequence), names)

    def head(self, dtype: str = "float32") -> Any:
        """The HeadBundle. Raises StoreError if it is missing or damaged."""
        return self.heads.load(self.target.weights_sha256, dtype)
