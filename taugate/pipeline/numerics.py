"""python -m taugate numerics discriminate|effect: what the numerics tests are worth, and what their subject does to τ.

discriminate  every injected fault of core, layer and whole model beside its budget, clean runs on other seeds, and
              what the published tolerances of other suites would have said of the same tensors
effect        Δτ between the kernel paths beside how far each is from float64 (python -m taugate.pipeline.effect)

On a GPU, fla's kernels run there; without one they are interpreted, which takes minutes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

from taugate.config import resolve
from taugate.errors import TaugateError
from taugate.numerics import discriminate as op_level
from taugate.numerics.budgets import Agreement, Budgets
from taugate.numerics.kernels import Kernels, open_kernels
from taugate.target import discriminate as model_level


def main(argv: list[str]) -> int:
    if argv[:1] == ["effect"]:
        from taugate.pipeline.effect import main as effect

        return effect(argv[1:])
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m taugate numerics", description=__doc__, formatter_class=layout)
    parser.add_argument("table", choices=("discriminate", "effect"))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--family", choices=op_level.FAMILIES, default="fla", help="whose kernels; fla unless given")
    parser.add_argument("--seeds", type=int, default=20, help="clean runs of each check; default 20")
    args = parser.parse_args(argv)
    try:
        budgets = Budgets(resolve(Path.cwd(), {}, os.environ).value.numerics.budget)
        with open_kernels(args.device) as kernels:
            return _discriminate(kernels, budgets, args.family, args.seeds)
    except TaugateError as error:
        print(error, file=sys.stderr)
        return 1


def _discriminate(kernels: Kernels, budgets: Budgets, family: str, seeds: int) -> int:
    bench = model_level.Bench(kernels, budgets, family)
    outcomes = chain(op_level.discriminate(kernels, budgets, family), model_level.discriminate(bench))
    rows: list[op_level.Outcome[Any]] = []
    print(f"{'fault':48} {'level':10} {'in':4}  {'clean':>5}  {'faulty':>8}  {'of budget':12}  let through by")
    for row in outcomes:
        rows.append(row)
        clean, faulty = (_share(agreement) for agreement in (row.clean, row.faulty))
        what = row.faulty.budget.what if row.caught else "MISSED"
        name = f"{row.fault.name:48} {row.fault.level:10} {row.fault.dtype:4}"
        print(f"{name}  {clean:5.2f}  {faulty:8.3g}  {what:12}  {', '.join(row.let_through)}", flush=True)
    alarms: list[Agreement] = []
    began = time.monotonic()
    for number, seed in enumerate(op_level.CLEAN_SEEDS[:seeds], 1):
        alarms += op_level.false_alarms(kernels, budgets, family, [seed])
        alarms += model_level.false_alarms(model_level.Bench(kernels, budgets, family), [seed])  # keeps no other seed's
        left = (time.monotonic() - began) / number * (seeds - number)
        print(f"clean seeds {number}/{seeds}, {len(alarms)} false alarms, about {left:.0f} s left", file=sys.stderr)
    for alarm in alarms:
        print(f"false alarm: {alarm}")
    caught = sum(row.caught for row in rows)
    summary = {
        "family": family, "device": kernels.device, "faults": len(rows), "caught": caught,
        "seeds": seeds, "false_alarms": len(alarms),
        "let_through": {name: sum(name in row.let_through for row in rows) for name in op_level.SUITES},
        "launches": kernels.launches.total(),
    }  # fmt: skip
    print(json.dumps(summary))
    return 0 if caught == len(rows) and not alarms else 1


def _share(agreement: Agreement) -> float:
    """Of the budget; of a budget of nothing, the value itself."""
    limit = agreement.budget.limit
    return agreement.value / limit if limit else agreement.value
