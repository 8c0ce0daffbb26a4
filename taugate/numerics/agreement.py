"""Paths beside the float64 reference, case by case, and each measure beside its budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taugate.numerics.budgets import Agreement, Budgets, check
from taugate.numerics.cases import Case, Run, expected, run_case
from taugate.numerics.kernels import Kernels
from taugate.numerics.measures import cosine_gap, relative_error, token_maximum

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """Errors of one path in one case: quantity → relative error, the index of the worst token, and the largest 1 − cos
    of a head's output, which is reported and never judged."""

    errors: dict[str, float]
    worst_token: int
    cosine_gap: float


def measure(out: Tensor, state: Tensor | None, want_out: Tensor, want_state: Tensor) -> Measured:
    """Relative errors "output", "token" (the worst token) and "state" of a path. Raises EvidenceError."""
    token = token_maximum(out, want_out)
    errors = {"output": relative_error(out, want_out), "token": token.error}
    if state is not None:
        errors["state"] = relative_error(state, want_state)
    return Measured(errors, token.index, cosine_gap(out, want_out))


def core(case: Case, run: Run, dtype: str, seed: int, device: str = "cpu") -> Measured:
    """One path on one case at core level."""
    inputs = case.inputs(dtype, seed, device)
    return measure(*run_case(case, run, inputs), *expected(case, inputs))


def path_runner(kernels: Kernels, path: str, dtype: str) -> Run:
    """A path as a function of its inputs."""
    return lambda inputs: kernels.run(path, inputs, dtype)


def judge(found: Measured, budgets: Budgets, level: str, dtype: str, path: str, case: str) -> list[Agreement]:
    """Every error beside its budget."""
    return [
        check(error, budgets.find(level, what, dtype, path), case, found.worst_token if what == "token" else None)
        for what, error in found.errors.items()
    ]


def worst(agreements: Iterable[Agreement]) -> list[Agreement]:
    """For each budget the agreement that comes nearest to it or exceeds it most."""
    nearest: dict[str, Agreement] = {}
    for agreement in agreements:
        key = str(agreement.budget)
        if key not in nearest or agreement.value > nearest[key].value:
            nearest[key] = agreement
    return list(nearest.values())
