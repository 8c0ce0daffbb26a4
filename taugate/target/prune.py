"""How much the store holds, and making room in it: `python -m taugate.target.store size|prune`."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from taugate.command import Parser, one_sentence
from taugate.errors import StoreError
from taugate.target.store import IN_USE, META, NEW

_GONE = ".gone-"
_ABANDONED_S = 3600.0  # an entry that was never finished, and that nobody has touched for so long
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Entry:
    """One state in the store: its directory, bytes on the disk, and when it was last read or written (Unix seconds)."""

    directory: Path
    bytes: int
    used: float


@dataclass(frozen=True)
class Pruned:
    """What a prune did (or would do) to one target. in_use: it was left alone because a process works with it."""

    target: str
    entries: int
    bytes: int
    pruned_entries: int
    pruned_bytes: int
    in_use: bool


def entries(target: Path) -> list[Entry]:
    """The entries of one target's directory, least recently used first. Contents are not looked at."""
    found = []
    for directory in target.glob("[0-9a-f][0-9a-f]/*"):
        if directory.name.startswith(".") or not directory.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):  # renamed by another process meanwhile
            stats = [path.stat() for path in directory.iterdir()]
            meta = directory / META
            used = meta.stat().st_mtime if meta.exists() else max((s.st_mtime for s in stats), default=0.0)
            found.append(Entry(directory, sum(s.st_size for s in stats), used))
    return sorted(found, key=lambda entry: entry.used)


def prune(
    root: Path,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    only: str | None = None,
    dry_run: bool = False,
    now: float | None = None,
) -> list[Pruned]:
    """Remove states below `root` that were not used for `older_than_s`, then the least recently used ones of all
    targets together until no more than `max_bytes` are left.

    only: prune this target, and count it alone. Targets in use by another process count, and nothing of theirs is
    removed. Raises StoreError for a root without a store and for an unknown target.
    """
    now = time.time() if now is None else now
    with contextlib.ExitStack() as stack:
        targets = _targets(root, only)
        free = {target for target in targets if stack.enter_context(_alone(target))}
        held = {target: entries(target) for target in targets}
        doomed = {
            entry.directory
            for target in free
            for entry in held[target]
            if older_than_s is not None and now - entry.used > older_than_s
        }
        if max_bytes is not None:
            left = sum(e.bytes for found in held.values() for e in found if e.directory not in doomed)
            for entry in sorted((e for target in free for e in held[target]), key=lambda e: e.used):
                if left > max_bytes and entry.directory not in doomed:
                    doomed.add(entry.directory)
                    left -= entry.bytes
        if not dry_run:
            for target in free:
                _remove(target, [e.directory for e in held[target] if e.directory in doomed], now)
        return [_told(target, held[target], doomed, target not in free) for target in targets]


def _targets(root: Path, only: str | None) -> list[Path]:
    found = sorted(path for path in (root / "states").glob("*") if path.is_dir())
    if not found:
        raise StoreError(f"{root} holds no states; name the store's directory with --store")
    if only is not None and only not in {path.name for path in found}:
        raise StoreError(f"{root} holds no target {only!r}; it has {', '.join(path.name for path in found)}")
    return [path for path in found if only in (None, path.name)]


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[bool]:
    """Whether nobody else works with this target's states; nobody can begin to, inside."""
    handle = os.open(target / IN_USE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        alone = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        yield alone
    finally:
        os.close(handle)


def _remove(target: Path, directories: Sequence[Path], now: float) -> None:
    for directory in directories:
        gone = directory.with_name(_GONE + directory.name)
        directory.rename(gone)  # first out of sight, so that an interruption leaves no half entry under its key
    for left in [*target.glob(f"*/{_GONE}*"), *target.glob(f"*/{NEW}*")]:
        if left.name.startswith(_GONE) or now - left.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(left)


def _told(target: Path, found: Sequence[Entry], doomed: set[Path], in_use: bool) -> Pruned:
    sizes = [entry.bytes for entry in found if entry.directory in doomed]
    return Pruned(target.name, len(found), sum(e.bytes for e in found), len(sizes), sum(sizes), in_use)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m taugate.target.store", description="The store's size; make room.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("size", "what the store holds, by target"), ("prune", "remove states by last use and size")):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--store", type=Path, default=Path(".taugate"), help="default: %(default)s")
        command.add_argument("--target", help="this target only; the directory's name below states/")
    command.add_argument("--older-than", type=_span, metavar="AGE", help='not used for this long: "12h", "30d"')
    command.add_argument("--max-size", type=_size, metavar="SIZE", help='least recently used go, until "200G" are left')
    command.add_argument("--dry-run", action="store_true", help="only tell what would be removed")
    args = parser.parse_args(argv)
    if args.command == "prune" and args.older_than is None and args.max_size is None:
        parser.error("prune needs --older-than, --max-size or both")
    return one_sentence(lambda: _size_report(args) if args.command == "size" else _prune_report(args))


def _size_report(args: argparse.Namespace) -> int:
    rows = []
    for target in _targets(args.store, args.target):
        found = entries(target)
        last = max((entry.used for entry in found), default=0.0)
        rows.append({"target": target.name, "entries": len(found), "bytes": sum(e.bytes for e in found),
                     "last_used": time.strftime("%Y-%m-%d", time.localtime(last)) if found else "-"})  # fmt: skip
    for name in ("heads", "completions", "captures"):
        files = [path for path in (args.store / name).rglob("*") if path.is_file()]
        print(f"{'(' + name + ')':40} {len(files):7} files  {sum(f.stat().st_size for f in files) / 2**20:12.1f} MiB")
    for row in rows:
        print(f"{row['target']:40} {row['entries']:7} states {row['bytes'] / 2**20:12.1f} MiB  used {row['last_used']}")
    total = {"entries": sum(r["entries"] for r in rows), "bytes": sum(r["bytes"] for r in rows)}
    print(f"{'total':40} {total['entries']:7} states {total['bytes'] / 2**20:12.1f} MiB")
    print(json.dumps({"targets": rows, **total}))
    return 0


def _prune_report(args: argparse.Namespace) -> int:
    done = prune(args.store, older_than_s=args.older_than, max_bytes=args.max_size, only=args.target,
                 dry_run=args.dry_run)  # fmt: skip
    verb = "would remove" if args.dry_run else "removed"
    for row in done:
        said = f"{verb} {row.pruned_entries} of {row.entries} states, {row.pruned_bytes / 2**20:.1f} MiB"
        print(f"{row.target:40} {'in use by another process, left alone' if row.in_use else said}")
    count, freed = sum(r.pruned_entries for r in done), sum(r.pruned_bytes for r in done)
    left = sum(r.bytes for r in done) - freed
    print(f"{'total':40} {verb} {count} states, {freed / 2**20:.1f} MiB; {left / 2**20:.1f} MiB are left")
    print(json.dumps({"dry_run": args.dry_run, "pruned_entries": count, "pruned_bytes": freed, "left_bytes": left,
                      "targets": [asdict(row) for row in done]}))  # fmt: skip
    if args.max_size is not None and left > args.max_size:
        print(f"{left / 2**20:.1f} MiB are left, more than --max-size: they are in use, try later", file=sys.stderr)
        return 1
    return 0


def _span(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if not found:
        raise argparse.ArgumentTypeError(f'{text!r} is no age such as "12h" or "30d"')
    return float(found[1]) * _SPANS[found[2]]


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f'{text!r} is no size such as "500M" or "200G"')
    return int(float(found[1]) * _SIZES.get(found[2], 1))


if __name__ == "__main__":
    sys.exit(main())
