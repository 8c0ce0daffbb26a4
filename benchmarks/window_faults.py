"""The fault matrix of the window, on hosts with a real systemd and a real sshd. Needs root on Linux.

    python -m benchmarks.window_faults [--jobs 3] [--only TEXT] [--core] [--ledger FILE] [--seconds N]

With a ledger, rows that were played before are kept there and not played again; --seconds begins no row after so long.
A table with one row per fault, then one JSON line: rows, restored, alarmed, violations, worst_restore_s.
Exit 1 on a violation, 3 if some are still to be played.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures.testhost.matrix import Row, Scenario, perform  # noqa: E402
from fixtures.testhost.rootfs import rootfs  # noqa: E402
from fixtures.testhost.scenarios_host import scenarios  # noqa: E402
from taugate.errors import HostError  # noqa: E402


def line(row: Row) -> str:
    began = "" if row.restore_s is None else f"{row.restore_s:.1f}"
    foreign = "alive" if row.foreign_alive else "KILLED"
    verdict = f"  VIOLATION: {row.violation}" if row.violation else ""
    return f"{row.name:<54} {row.outcome:<9} {row.downtime_s:>8.1f} {began:>8} {foreign:>7}{verdict}"


def play(scenario: Scenario, directory: Path, end: float) -> Row | None:
    """A row also for a host that did not come up; None once `end` (monotonic) has passed."""
    if time.monotonic() > end:
        return None
    try:
        return perform(scenario, directory)
    except HostError as error:
        return Row(scenario.name, scenario.expected, "no host", 0.0, None, True, str(error), 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="window_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=3, help="hosts at once")
    parser.add_argument("--only", default="", help="rows with this text in their name")
    parser.add_argument("--core", action="store_true", help="only the rows that CI runs")
    parser.add_argument("--ledger", type=Path, help="JSON lines, one per row played")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so long")
    given = parser.parse_args()
    rootfs()
    chosen = [one for one in scenarios() if given.only in one.name and (one.core or not given.core)]
    known = given.ledger.read_text().splitlines() if given.ledger and given.ledger.exists() else []
    played = {row.name: row for row in (Row(**json.loads(text)) for text in known)}
    end = time.monotonic() + given.seconds
    print(f"{'fault':<54} {'server':<9} {'down s':>8} {'began s':>8} {'foreign':>7}", flush=True)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="taugate-faults-") as folder,
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        futures = {
            one.name: pool.submit(play, one, Path(folder) / str(n), end)
            for n, one in enumerate(chosen)
            if one.name not in played
        }
        for one in chosen:
            row = played[one.name] if one.name in played else futures[one.name].result()
            if row is None:
                continue
            rows.append(row)
            print(line(row), flush=True)
            if given.ledger and one.name not in played:
                with open(given.ledger, "a") as ledger:
                    ledger.write(json.dumps(asdict(row)) + "\n")
    began = [row.restore_s for row in rows if row.restore_s is not None]
    summary = {
        "rows": len(rows),
        "restored": sum(row.outcome == "restored" for row in rows),
        "alarmed": sum(row.outcome == "alarmed" for row in rows),
        "violations": sum(bool(row.violation) for row in rows),
        "worst_restore_s": round(max(began), 2) if began else None,
    }
    print(json.dumps(summary))
    return 1 if summary["violations"] else 3 if len(rows) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
