"""A data set of states that another tool cached (`taugate.target.formats`), ready to be replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from taugate.drafter.replay import CachedSequence
from taugate.errors import StoreError
from taugate.pipeline.dataset import Dataset
from taugate.target.checkpoint import TargetInfo, find_checkpoint
from taugate.target.formats import Facts, identity
from taugate.target.head import HeadStore
from taugate.target.store import StateStore


def imported_dataset(manifest: Path, root: Path) -> Dataset:
    """The sequences of an import's manifest, with their states below `root` and the head of the model it names.

    Every token after the prompt counts as the target's own; the on-policy rate tells whether that holds. Raises
    StoreError for a manifest that is damaged, and for sequences whose file does not say where the prompt ends;
    CheckpointError.
    """
    try:
        raw: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
        given = raw["facts"] | {"layer_ids": tuple(raw["facts"]["layer_ids"])}
        facts, target, entries = Facts(**given), TargetInfo.from_json(raw["target"]), raw["entries"]
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise StoreError(f"{manifest} is no manifest of an import ({error})") from None
    if unknown := [entry["file"] for entry in entries if entry["prompt_length"] is None]:
        raise StoreError(
            f"{manifest} has {len(unknown)} sequences whose prompt_length is not known, the first is {unknown[0]}; "
            "write it into the manifest"
        )
    who, store = identity(raw["format"], facts, target), StateStore(root, target.name)
    sequences = []
    for entry in entries:
        ids = store.meta(entry["key"]).get("fields", {}).get("token_ids")
        if ids is None or who.key(ids) != entry["key"]:
            raise StoreError(f"{manifest} names {entry['file']}, whose states are not in {store.root}; import it again")
        sequences.append(CachedSequence(entry["file"], tuple(ids), entry["prompt_length"], len(ids)))
    heads = HeadStore(root)
    heads.produce(find_checkpoint(str(facts.model)), target.weights_sha256)
    return Dataset(target, tuple(sequences), who, store, heads)
