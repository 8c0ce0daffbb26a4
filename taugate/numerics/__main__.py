"""The numerics at op and layer level, as tables.

python -m taugate.numerics core          every path beside the float64 reference and its budgets
python -m taugate.numerics discriminate  injected faults, clean runs, and what other suites would have said
python -m taugate.numerics calibrate     largest errors over the seeds on which budgets are set

On a GPU, fla's kernels run there; without one they are interpreted, which takes minutes. Each table ends with one
line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taugate.command import Parser, one_sentence
from taugate.config import resolve
from taugate.numerics import discriminate as faults
from taugate.numerics.agreement import core, judge, path_runner, worst
from taugate.numerics.budgets import Agreement, Budgets
from taugate.numerics.cases import core_cases, recurrent_cases
from taugate.numerics.kernels import DTYPES, PATHS, Kernels, open_kernels
from taugate.numerics.layer import LAYER_CASES, build, expected_layer, run_layer

CALIBRATION_SEEDS = range(16)


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m taugate.numerics", description=__doc__)
    parser.add_argument("table", choices=("core", "discriminate", "calibrate"))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--family", choices=faults.FAMILIES, default="fla", help="whose kernels; fla unless given")
    parser.add_argument("--seeds", type=int, default=20, help="clean runs of each check (discriminate); default 20")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="core, calibrate: only these; may be repeated")
    parser.add_argument("--gate-config", type=Path, help="another gate.toml")
    args = parser.parse_args(argv)

    def table() -> int:
        budgets = Budgets(resolve(Path.cwd(), {}, os.environ, file=args.gate_config).value.numerics.budget)
        with open_kernels(args.device) as kernels:
            if args.table == "discriminate":
                return _discriminate(kernels, budgets, args.family, args.seeds)
            seeds = CALIBRATION_SEEDS if args.table == "calibrate" else [500]
            return _core(kernels, budgets, args.family, args.dtype or DTYPES, seeds)

    return one_sentence(table)


def _discriminate(kernels: Kernels, budgets: Budgets, family: str, seeds: int) -> int:
    rows = []
    print(f"{'fault':46} {'level':5} {'in':4}  {'clean':>7}  {'faulty':>8}  of budget  let through by")
    for row in faults.discriminate(kernels, budgets, family):
        rows.append(row)
        clean, faulty = (a.value / a.budget.limit for a in (row.clean, row.faulty))
        verdict = f"{faulty:8.3g}  {row.faulty.budget.what:9}" if row.caught else f"{faulty:8.3g}  MISSED   "
        by = ", ".join(row.let_through)
        print(f"{row.fault.name:46} {row.fault.level:5} {row.fault.dtype:4}  {clean:7.2f}  {verdict}  {by}", flush=True)
    clean_seeds = faults.CLEAN_SEEDS[:seeds]
    alarms = list(faults.false_alarms(kernels, budgets, family, clean_seeds))
    for alarm in alarms:
        print(f"false alarm: {alarm}")
    summary: dict[str, Any] = {
        "family": family,
        "device": kernels.device,
        "faults": len(rows),
        "caught": sum(row.caught for row in rows),
        "clean_runs": len(rows) * len(clean_seeds),
        "seeds": len(clean_seeds),
        "false_alarms": len(alarms),
        "let_through": {name: sum(name in row.let_through for row in rows) for name in faults.SUITES},
        "launches": sum(kernels.launches.values()),
    }
    print(json.dumps(summary))
    return 0 if summary["caught"] == summary["faults"] and not alarms else 1


def _core(kernels: Kernels, budgets: Budgets, family: str, dtypes: Sequence[str], seeds: Sequence[int]) -> int:
    found: list[Agreement] = []
    for dtype in dtypes:
        for path in (path for path in PATHS if path.startswith(family)):
            if dtype == "tf32" and path != "fla-chunk":
                continue  # the others have no dots that a GPU would do in TF32
            run = path_runner(kernels, path, dtype)
            cases = (recurrent_cases if path == "fla-recurrent" else core_cases)(packed=family == "fla")
            for case in cases:
                for seed in seeds:
                    errors = core(case, run, dtype, seed, kernels.device)
                    found += judge(errors, budgets, "core", dtype, path, f"{case.name}, seed {seed}")
        if dtype != "tf32":
            found += _layers(kernels, budgets, family, dtype, seeds)
    print(f"{'level':6} {'what':7} {'in':5} {'path':16} {'worst':>9}  {'budget':>8}  {'unit':9} where")
    for a in worst(found):
        b = a.budget
        row = f"{b.level:6} {b.what:7} {b.dtype:5} {b.path:16} {a.value:9.3g}  {b.limit:8.3g}  {b.unit:9} {a.case}"
        print(row if a.ok else f"{row}  EXCEEDED")
    failed = [a for a in found if not a.ok]
    summary = {"family": family, "device": kernels.device, "seeds": len(seeds), "measures": len(found)}
    print(json.dumps(summary | {"exceeded": len(failed), "launches": sum(kernels.launches.values())}))
    return 1 if failed else 0


def _layers(
    kernels: Kernels, budgets: Budgets, family: str, dtype: str, seeds: Sequence[int]
) -> list[Agreement]:
    from taugate.numerics.agreement import measure

    paths = [path_runner(kernels, f"{family}-{kind}", dtype) for kind in ("chunk", "recurrent")]
    found = []
    for case in LAYER_CASES:
        for seed in seeds:
            layer = build(case, dtype, seed, kernels.device)
            errors = measure(run_layer(case, layer, *paths), None, expected_layer(case, layer), None)
            found += judge(errors, budgets, "layer", dtype, family, f"{case.name}, seed {seed}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
