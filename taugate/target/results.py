"""Results of a capture on their way: KEY.safetensors with the states and KEY.json that says what they are.

    python -m taugate.target.results --spec spec.json --out DIR

tells which sequences of a capture's spec are complete in DIR, as one JSON line. A state is complete when its KEY.json
is there: it is written last. The states file is the same on every run, so it holds tensors and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.command import Parser, one_sentence
from taugate.errors import CheckpointError
from taugate.files import sha256_file, sha256_json, sync, write_atomic
from taugate.target.jobspec import read_spec
from taugate.target.shards import read_header
from taugate.target.store import FINAL_HIDDEN, tap_name

if TYPE_CHECKING:
    from torch import Tensor


def wanted_names(spec: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that a spec asks for, for each of its sequences."""
    return [*map(tap_name, spec["taps"]), *([FINAL_HIDDEN] if spec.get("final_hidden", True) else [])]


@dataclass(frozen=True)
class Results:
    """The directory of a capture's results."""

    directory: Path

    def file(self, key: str) -> Path:
        return self.directory / f"{key}.safetensors"

    def complete(self, key: str, token_ids: Sequence[int], names: Sequence[str]) -> dict[str, Any] | None:
        """What KEY.json says if all `names` of these tokens are there, else None. Reads headers, not contents."""
        try:
            record = json.loads((self.directory / f"{key}.json").read_text(encoding="utf-8"))
            there = read_header(self.file(key))
        except (OSError, ValueError, CheckpointError):
            return None
        if not isinstance(record, dict):
            return None
        same_tokens = record.get("tokens_sha256") == sha256_json(list(token_ids))
        return record if same_tokens and there.keys() >= set(names) else None

    def write(
        self, key: str, token_ids: Sequence[int], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write one sequence: the states under another name, synced, renamed, then KEY.json. Returns the latter.

        Raises OSError or safetensors' own error when the disk does not take it; nothing half is left then.
        """
        from safetensors.torch import save_file

        partial = self.directory / f".{key}.{os.getpid()}.partial"
        try:
            save_file(dict(sorted(tensors.items())), partial)
            sync(partial)
            digest, size = sha256_file(partial), partial.stat().st_size
            partial.replace(self.file(key))
        finally:
            partial.unlink(missing_ok=True)
        record = {
            "sha256": digest,
            "bytes": size,
            "names": sorted(tensors),
            "tokens": len(token_ids),
            "tokens_sha256": sha256_json(list(token_ids)),
            **facts,
        }
        write_atomic(self.directory / f"{key}.json", json.dumps(record))
        return record

    def forget(self, key: str) -> None:
        """Remove the files of one sequence: they are elsewhere by now."""
        self.file(key).unlink(missing_ok=True)
        (self.directory / f"{key}.json").unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what killed writers left half written."""
        for pattern in (".*.partial", ".*.json.*", ".tmp*"):  # the last are safetensors' own
            for path in self.directory.glob(pattern):
                path.unlink(missing_ok=True)


def complete_sequences(spec: Mapping[str, Any], out: Path) -> dict[str, dict[str, Any]]:
    """The records of those sequences of `spec` that are complete in `out`, by key."""
    names, results = wanted_names(spec), Results(out)
    found = {s["key"]: results.complete(s["key"], s["token_ids"], names) for s in spec["sequences"]}
    return {key: record for key, record in found.items() if record}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m taugate.target.results", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="the capture's spec")
    parser.add_argument("--out", type=Path, required=True, help="the capture's directory")
    args = parser.parse_args(argv)

    def tell() -> int:
        print(json.dumps({"event": "done", "files": complete_sequences(read_spec(args.spec), args.out)}), flush=True)
        return 0

    return one_sentence(tell)


if __name__ == "__main__":
    sys.exit(main())
