"""Random faults in random order; benchmarks/window_schedules.py plays 200 schedules."""

from __future__ import annotations

from fixtures.testhost.needed import need_host
from fixtures.testhost.schedules import run_schedules


def test_a_few_random_schedules():
    need_host()
    run_schedules(3, first_seed=1)
