"""results.jsonl, the interface for machines: one JSON record per line, written the moment it exists.

Runs append to the same file and are told apart by `run`; `read_results` gives the records of the last one.
A run that came to its end closes with a record of type "run" with pytest's exit status; one without it was
killed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from taugate.errors import EvidenceError

SCHEMA_VERSION = 1
RECORD_TYPES = (
    "provenance", "plan", "window", "completion", "fidelity", "measurement", "verdict", "agreement", "divergence",
    "effect", "run",
)  # fmt: skip


class ResultsWriter:
    """Appends records to `path`; the file and its directory appear with the first record."""

    def __init__(self, path: Path, run: str | None = None) -> None:
        self.path = path
        self.run = run or uuid.uuid4().hex[:12]

    def append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write one record and return it as written: with schema version, run and time. Raises as `plain`."""
        full = {"schema_version": SCHEMA_VERSION, "run": self.run, "at": now()} | plain(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # One write of one whole line: a killed run keeps every earlier record and leaves no half of this one.
        with open(self.path, "ab", buffering=0) as stream:
            stream.write((json.dumps(full, ensure_ascii=False) + "\n").encode())
        return full


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `record` in plain JSON types. Raises EvidenceError for an unknown type and for NaN."""
    if record.get("type") not in RECORD_TYPES:
        known = ", ".join(RECORD_TYPES)
        raise EvidenceError(f"a record has the type {record.get('type')!r}; known types are {known}")
    try:
        return json.loads(json.dumps(dict(record), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise EvidenceError(f"a record of type {record['type']!r} is not plain JSON: {error}") from None


def read_results(path: Path, run: str | None = None) -> list[dict[str, Any]]:
    """The records of one run, by default the last in the file.

    Raises EvidenceError if the file is missing, holds no such run, or a line is not a record of a known
    version.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EvidenceError(f"cannot read results: {error}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            version = record["schema_version"]
        except (ValueError, KeyError, TypeError):
            raise EvidenceError(f"{path} line {number} is not a results record") from None
        if version != SCHEMA_VERSION:
            raise EvidenceError(f"{path} line {number} has schema version {version}, not {SCHEMA_VERSION}")
        records.append(record)
    wanted = run or (records[-1]["run"] if records else None)
    found = [record for record in records if record["run"] == wanted]
    if not found:
        raise EvidenceError(f"{path} holds no run {run}" if run else f"{path} holds no records")
    return found


def now() -> str:
    """The current time in UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
