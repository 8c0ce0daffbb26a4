"""The parts of a JUnit file that need no pytest: suite properties, and per-test numbers as one JSON line.

There is no standard for JUnit files. Properties inside <testcase> make strict consumers (the xUnit plugin
of Jenkins) reject the whole file, while suite properties and <system-out> pass everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

NUMBERS_KEY = "taugate_numbers"


def suite_properties(records: Iterable[Mapping[str, Any]], prefix: str = "taugate") -> dict[str, str]:
    """Name and value of the suite's properties, out of the records of type "provenance"; later ones win.

    Nested tables become dotted names. What only serves the results file (time, schema version) is left
    out.
    """
    properties: dict[str, str] = {}
    for record in records:
        if record.get("type") == "provenance":
            content = {
                key: value for key, value in record.items() if key not in ("type", "schema_version", "at")
            }
            properties |= _flatten(content, prefix)
    return properties


def _flatten(table: Mapping[str, Any], prefix: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in table.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            flat |= _flatten(value, name)
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def numbers_line(numbers: Mapping[str, Any]) -> str:
    """Per-test numbers as one line of JSON that `read_numbers` finds again; NaN becomes text."""
    return json.dumps(
        {NUMBERS_KEY: {key: _plain(value) for key, value in numbers.items()}}, ensure_ascii=False
    )


def read_numbers(system_out: str) -> dict[str, Any]:
    """The numbers in the text of a <system-out>, all lines merged."""
    found: dict[str, Any] = {}
    for line in system_out.splitlines():
        if line.startswith(f'{{"{NUMBERS_KEY}"'):
            found |= json.loads(line)[NUMBERS_KEY]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else str(value)
