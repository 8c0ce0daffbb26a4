"""Small suites for pytest inside pytest: the project's plugin and pytest.ini, in a directory of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# Imported here once: pytester forgets what an inner run imports, and pydantic takes a while.
import taugate.config
import taugate.report.junit
import taugate.report.results
import taugate.report.table  # noqa: F401

PROJECT = Path(__file__).parents[1]

GATE = """
import pytest

VERDICT = {"type": "verdict", "gate": "chain min_tau", "outcome": "pass", "sentence": "3.1 >= 2.0"}
NOT_NEEDED = {"type": "window", "outcome": "not needed", "reason": "every state is cached"}
"""


def make_suite(pytester: pytest.Pytester, body: str, name: str = "test_inner.py") -> Path:
    """Write `name` with `body` (after the helpers in GATE) beside the project's pytest.ini, and return it."""
    ini = (PROJECT / "pytest.ini").read_text()
    ini = re.sub(r"(?m)^(pythonpath) = .*", rf"\1 = {PROJECT}", ini)
    ini = re.sub(r"(?m)^(testpaths) = .*", r"\1 = .", ini)
    # Plugins of other packages cost a second per inner run: they import themselves anew each time.
    ini = ini.replace("-p no:taugate", "-p no:taugate -p no:hypothesispytest -p no:anyio")
    # An inner run in this process finds the package's metadata in an installed checkout, and the package imported.
    seen = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
    ini = ini.replace("    error\n", f"    error\n    {seen}\n", 1)
    (pytester.path / "pytest.ini").write_text(ini)
    (pytester.path / "conftest.py").write_text('pytest_plugins = ["fixtures.plugin"]\n')
    path = pytester.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(GATE + body)
    return path
