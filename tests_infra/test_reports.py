"""The JUnit file, valid with and without xdist, and the table on the terminal."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import xmlschema

from fixtures.progress import Ticker
from taugate.report.junit import numbers_line, read_numbers, suite_properties
from taugate.report.table import render
from tests_infra.inner import make_suite

SCHEMA = Path(__file__).parent / "data" / "junit.xsd"
SUITE = """
@pytest.mark.numerics
def test_one(evidence, record_numbers):
    evidence.add({"type": "provenance", "torch": "2.13.0", "gpu": {"name": "none", "count": 0}})
    evidence.add({"type": "agreement", "level": "x", "error": 1e-4})
    print("printed <by> the test")
    record_numbers(tau=3.125, low=2.5)
    record_numbers(outcome="pass")

@pytest.mark.numerics
def test_two(record_numbers):
    record_numbers(tau=float("nan"))
    assert False, "tau \\x1b[31mtoo low\\x00"

@pytest.mark.numerics
def test_three(): pytest.skip("why")

@pytest.fixture
def broken():
    yield
    raise RuntimeError("teardown")

@pytest.mark.numerics
def test_four(broken, record_numbers): record_numbers(n=1)

@pytest.mark.numerics
def test_five(broken): assert False
"""


def run(pytester, *options, logging="system-out"):
    make_suite(pytester, SUITE)
    pytester.runpytest_subprocess(
        "-m", "numerics", "--junitxml=out.xml", "-o", f"junit_logging={logging}", *options
    )
    return pytester.path / "out.xml"


def outputs(path: Path) -> dict[str, str]:
    cases = ElementTree.parse(path).iter("testcase")
    return {case.get("name"): "".join(out.text or "" for out in case.iter("system-out")) for case in cases}


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "xdist"])
def test_the_file_is_valid_and_complete(pytester, workers):
    path = run(pytester, *workers)
    xmlschema.validate(path, SCHEMA)
    properties = {item.get("name"): item.get("value") for item in ElementTree.parse(path).iter("property")}
    assert properties.pop("taugate.run")
    assert properties == {
        "taugate.torch": "2.13.0", "taugate.gpu.name": "none", "taugate.gpu.count": "0",
    }  # fmt: skip
    out = outputs(path)
    assert set(out) == {"test_one", "test_two", "test_three", "test_four", "test_five"}
    assert read_numbers(out["test_one"]) == {"tau": 3.125, "low": 2.5, "outcome": "pass"}
    assert "printed <by> the test" in out["test_one"]
    assert read_numbers(out["test_two"]) == {"tau": "nan"}
    assert read_numbers(out["test_four"]) == {"n": 1}


def test_numbers_survive_when_pytest_writes_no_output(pytester):
    path = run(pytester, logging="no")
    xmlschema.validate(path, SCHEMA)
    assert read_numbers(outputs(path)["test_one"])["tau"] == 3.125
    assert "printed" not in outputs(path)["test_one"]


def test_without_strict_numbers_are_properties_of_the_testcase(pytester):
    path = run(pytester, "--set", "report.junit_strict=false")
    cases = {case.get("name"): case for case in ElementTree.parse(path).iter("testcase")}
    assert {item.get("name") for item in cases["test_one"].iter("property")} == {"tau", "low", "outcome"}
    with pytest.raises(xmlschema.XMLSchemaValidationError):
        xmlschema.validate(path, SCHEMA)


def test_the_table_is_on_the_terminal(pytester):
    make_suite(pytester, SUITE)
    result = pytester.runpytest_inprocess("-m", "numerics")
    result.stdout.fnmatch_lines(["*= taugate =*", "agreement", "x*error=0.0001"])


def test_a_line_reaches_the_terminal_despite_capture(pytester):
    make_suite(pytester, "def test_x(say):\n    print('captured')\n    say('window: stopped')\n")
    result = pytester.runpytest_subprocess("--capture=fd")
    result.stdout.fnmatch_lines(["taugate: window: stopped"])
    result.stdout.no_fnmatch_line("captured")
    pytester.runpytest_subprocess("-n", "1").assert_outcomes(passed=1)


def test_a_ticker_is_rate_limited_and_estimates_what_is_left():
    now, lines = [0.0], []
    tick = Ticker(lines.append, "capture", 40, every=10, clock=lambda: now[0])
    for done in range(1, 41):
        now[0] = done * 3.0
        tick(done)
    assert lines[0] == "capture 4/40, 1:48 left"
    assert lines[-1] == "capture 40/40 in 2:00"
    assert len(lines) == 10


RECORDS = [
    {
        "type": "window", "outcome": "restored", "window_id": "w1", "downtime_s": 41.26,
        "phases": [
            {"phase": "LEASED", "at_iso": "2026-01-02T03:04:05.678Z", "seconds": 0.42, "detail": "timer armed"},
            {"phase": "STOPPED", "at_iso": "2026-01-02T03:04:06.100Z", "seconds": 2.0, "detail": ""},
        ],
        "escalations": ["SIGKILL to pid 7"], "notes": ["drain: idle"], "lease_lost": "",
        "canary": {"same": False, "first_difference": 3, "top2_margin": 0.0123},
        "fingerprint": {"fields": 9, "differ": ["version was 1 and is 2"]},
    },
    {
        "type": "measurement", "drafter": "candidate", "verifier": "chain", "definition": "longest prefix",
        "tau": 3.1, "low": 2.9, "high": 3.3, "tau_macro": 3.2, "tau_anchors": None,
        "tokens": 2560, "cycles": 826, "prompts": 32,
    },
    {"type": "measurement", "drafter": "candidate", "verifier": "topk-8", "tau": 5, "low": 4.8, "high": 5.2},
    {"type": "verdict", "gate": "chain min_tau", "outcome": "fail", "sentence": "3.300 < 4.5"},
    {"type": "completion", "id": "p1"},
]  # fmt: skip


def test_the_table_line_by_line():
    assert render(RECORDS) == [
        "window w1: restored, server down for 41.3 s",
        "  phase    at          seconds  took  detail",
        "  LEASED   03:04:05.6      0.4   1.6  timer armed",
        "  STOPPED  03:04:06.1      2.0     -",
        "  SIGKILL to pid 7",
        "  drain: idle",
        "  canary: other tokens from number 3 on, top-2 margin there 0.0123",
        "  changed: version was 1 and is 2",
        "  9 fields of the server compared, 1 changed",
        "",
        "drafter    verifier  τ [low, high]         tau_macro  tau_anchors  tokens  cycles  prompts",
        "candidate  chain     3.100 [2.900, 3.300]      3.200            -    2560     826       32",
        "candidate  topk-8    5.000 [4.800, 5.200]          -            -       -       -        -",
        "  chain: longest prefix",
        "",
        "FAIL  chain min_tau  3.300 < 4.5",
    ]
    assert render([]) == []


def test_properties_come_from_provenance_only_and_later_ones_win():
    records = [
        {"type": "provenance", "at": "now", "a": {"b": [1, 2]}, "c": 1},
        {"type": "measurement", "x": 1},
        {"type": "provenance", "c": None},
    ]
    assert suite_properties(records) == {"taugate.a.b": "[1, 2]", "taugate.c": "null"}


def test_numbers_are_one_line_and_found_among_others():
    line = numbers_line({"text": "a\nb", "inf": float("inf"), "path": Path("x")})
    assert "\n" not in line
    assert read_numbers(f"noise\n{line}\nnoise") == {"text": "a\nb", "inf": "inf", "path": "x"}
