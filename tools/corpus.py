"""Training text for the tiny pair: permissively licensed Python source found on this machine, with a manifest.

The standard library and those installed distributions whose metadata name only permissive licences.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PERMISSIVE = re.compile(r"\b(mit|bsd|apache|psf|python software foundation|isc|0bsd|zlib|unlicense|cc0|hpnd)\b", re.I)
FORBIDDEN = re.compile(r"gpl|general public|mozilla|mpl|proprietary|nvidia|eula|commercial|eclipse", re.I)
MAX_BYTES = 200_000


@dataclass(frozen=True)
class Source:
    """One source file: where it came from, under which licence, and its content."""

    name: str
    sha256: str
    licence: str
    text: str


def _licence(distribution: metadata.Distribution) -> str | None:
    """The licence statement when everything it says is permissive, else None."""
    info = distribution.metadata
    said = [info.get("License-Expression") or "", (info.get("License") or "")[:200]]
    said += [c for c in info.get_all("Classifier") or [] if c.startswith("License")]
    text = " | ".join(part for part in said if part).replace("\n", " ")
    return text[:80] if PERMISSIVE.search(text) and not FORBIDDEN.search(text) else None


def _candidates() -> list[tuple[str, Path, str]]:
    found = []
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib.rglob("*.py"):
        if "site-packages" not in path.parts and "idlelib" not in path.parts:
            found.append((f"stdlib/{path.relative_to(stdlib)}", path, "PSF-2.0"))
    for distribution in metadata.distributions():
        licence = _licence(distribution)
        whose = f"{distribution.metadata['Name']}=={distribution.version}"  # parsed anew each time it is asked for
        for entry in distribution.files or [] if licence else []:
            if entry.suffix == ".py" and not str(entry).startswith(".."):
                found.append((f"{whose}/{entry}", Path(str(distribution.locate_file(entry))), licence))
    return sorted(found)


def collect(limit_bytes: int, seed: int) -> list[Source]:
    """Up to `limit_bytes` of distinct source files in a seeded order; generated-looking files are left out."""
    sources, seen, total = [], set(), 0
    candidates = _candidates()
    random.Random(seed).shuffle(candidates)
    for name, path, licence in candidates:
        try:
            data = path.read_bytes()
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(data).hexdigest()
        lines = text.count("\n") + 1
        if digest in seen or not 400 <= len(data) <= MAX_BYTES or len(data) / lines > 80 or not text.isascii():
            continue
        seen.add(digest)
        sources.append(Source(name, digest, licence, text.replace("\r\n", "\n")))
        total += len(data)
        if total >= limit_bytes:
            break
    return sources


def manifest(sources: list[Source]) -> str:
    """Tab-separated lines `sha256  bytes  licence  name`, sorted by name."""
    rows = (f"{s.sha256}\t{len(s.text)}\t{s.licence}\t{s.name}" for s in sorted(sources, key=lambda s: s.name))
    return "\n".join(rows) + "\n"
