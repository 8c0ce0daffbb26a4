"""Do the budgets of whole models tell bugs from rounding? As `taugate.numerics.discriminate`, one level up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from taugate.numerics.budgets import Agreement, Budgets
from taugate.numerics.discriminate import FAULT_SEED, Outcome, Pair, furthest, let_through
from taugate.numerics.kernels import Kernels
from taugate.target.agreement import LEVELS, judge_level
from taugate.target.faults import CASES, FAULTS, ModelCase, ModelFault
from taugate.target.levels import Comparison
from taugate.target.paths import on_path
from taugate.target.random_model import random_model
from taugate.target.reference import Reference

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Bench:
    """Runs cases on one path. Models and clean runs are kept, since faults share them."""

    def __init__(self, kernels: Kernels, budgets: Budgets, path: str) -> None:
        self._kernels, self._budgets, self._path = kernels, budgets, path
        self._models: dict[tuple[int, str, int], tuple[Any, Reference]] = {}
        self._clean: dict[tuple[str, str, str, int], Comparison] = {}

    def run(self, case: ModelCase, level: str, dtype: str, seed: int, fault: ModelFault | None = None) -> Comparison:
        """One case at one level ("layer", else free running), with or without a fault."""
        key = (case.name, "layer" if level == "layer" else "free", dtype, seed)
        if fault is None and key in self._clean:
            return self._clean[key]
        model, reference = self._model(case, dtype, seed)
        if fault and fault.model:
            model = fault.model(model)
        comparison = Comparison(reference, model, self._path, dtype, fault.record if fault else None)
        with on_path(model, self._path, self._kernels, dtype, fault.swaps if fault else None):
            if level == "layer":
                comparison.add_layers(case.batch(seed))
            else:
                comparison.add(case.batch(seed))
        if fault is None:
            self._clean[key] = comparison
        return comparison

    def judged(
        self, case: ModelCase, level: str, dtype: str, seed: int, fault: ModelFault | None = None
    ) -> list[Agreement]:
        """Every measure of the level beside its budget."""
        found = self.run(case, level, dtype, seed, fault)
        return judge_level(found, level, self._budgets, f"{case.name}, seed {seed}")

    def _model(self, case: ModelCase, dtype: str, seed: int) -> tuple[Any, Reference]:
        key = (id(case.sizes), dtype, seed)
        if key not in self._models:
            model = random_model(dict(case.sizes), seed, DTYPES[dtype], self._kernels.device)
            self._models[key] = (model, Reference.from_model(model))
        return self._models[key]


def discriminate(bench: Bench, suites: bool = True) -> Iterator[Outcome[ModelFault]]:
    """Every fault, clean and faulty on the same inputs. suites: also ask what others would have said of the tensors."""
    for fault in FAULTS:
        clean, faulty = (
            furthest(bench.judged(fault.case, fault.level, fault.dtype, FAULT_SEED, which)) for which in (None, fault)
        )
        yield Outcome(fault, clean, faulty, _let_through(bench, fault) if suites else ())


def _let_through(bench: Bench, fault: ModelFault) -> tuple[str, ...]:
    """Suites that accept the faulty run, or reject the clean one too, in both precisions."""

    def pairs(dtype: str, which: ModelFault | None) -> Sequence[Pair]:
        return bench.run(fault.case, fault.level, dtype, FAULT_SEED, which).pairs

    return let_through((pairs(dtype, None), pairs(dtype, fault)) for dtype in DTYPES)


def false_alarms(
    bench: Bench, seeds: Sequence[int], cases: Sequence[ModelCase] = CASES
) -> Iterator[Agreement]:
    """Every case at every level in every precision, without any fault: the measures that exceed their budget."""
    for seed in seeds:
        for case in cases:
            for level in LEVELS:
                for dtype in DTYPES:
                    yield from (a for a in bench.judged(case, level, dtype, seed) if not a.ok)
