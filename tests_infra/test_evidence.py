"""A green run has evidence: what is missing turns exit code 0 into 1, with a sentence."""

from __future__ import annotations

import json

import pytest

from fixtures.evidence import NOT_GIVEN_BACK
from taugate.errors import EvidenceError
from taugate.report.results import ResultsWriter, read_results
from tests_infra.inner import make_suite

WINDOW = "@pytest.mark.gpu_window\ndef test_window(evidence):\n    "


def run_gate(pytester, body, *options):
    make_suite(pytester, body)
    return pytester.runpytest_inprocess("-m", "gpu_window", *options)


def assert_not_green(result, sentence):
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*not green, although no test failed: *{sentence}*"])


def test_a_verdict_and_a_window_are_enough(pytester):
    result = run_gate(pytester, WINDOW + "evidence.add(VERDICT); evidence.add(NOT_NEEDED)")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        ["window: not needed (every state is cached)", "PASS  chain min_tau  3.1 >= 2.0"]
    )


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (WINDOW + "pass", "no verdict"),
        (WINDOW + "evidence.add(NOT_NEEDED)", "no verdict"),
        (WINDOW + "evidence.add(VERDICT)", "no window was recorded"),
        (WINDOW + "evidence.add(VERDICT); evidence.add(NOT_NEEDED | {'outcome': 'odd'})", "a window ended odd"),
        (WINDOW + "evidence.add(VERDICT | {'outcome': 'fail'}); evidence.add(NOT_NEEDED)", "verdict fail"),
        (WINDOW + "evidence.add(VERDICT | {'outcome': 'inconclusive'}); evidence.add(NOT_NEEDED)", "inconcl"),
        (WINDOW + "evidence.add(VERDICT); evidence.add(NOT_NEEDED); pytest.skip('x')", "1 of 1 gpu_window"),
        ("@pytest.mark.skip\n" + WINDOW + "pass", "1 of 1 gpu_window tests"),
        (
            WINDOW + "evidence.add(VERDICT); evidence.add(NOT_NEEDED)\n"
            "@pytest.mark.gpu_window\n@pytest.mark.xfail\ndef test_other(): assert False",
            "1 of 2 gpu_window tests",
        ),
    ],
)  # fmt: skip
def test_a_gate_without_evidence_is_red(pytester, body, sentence):
    assert_not_green(run_gate(pytester, body), sentence)


@pytest.mark.parametrize("body", ["pass", "assert False", "raise KeyboardInterrupt"])
def test_a_server_that_was_not_given_back_has_an_exit_code_of_its_own(pytester, body):
    broken = "{'type': 'window', 'outcome': 'broken', 'error': 'a.service was not restored: it failed'}"
    result = run_gate(pytester, WINDOW + f"evidence.add(VERDICT); evidence.add({broken})\n    {body}")
    assert result.ret == NOT_GIVEN_BACK == 70
    result.stdout.fnmatch_lines(["*NOT GIVEN BACK (exit code 70): a.service was not restored: it failed"])
    end = read_results(pytester.path / ".taugate/reports/results.jsonl")[-1]
    assert end["exit_status"] == 70


def test_other_exit_codes_are_left_alone(pytester):
    assert run_gate(pytester, WINDOW + "assert False").ret == pytest.ExitCode.TESTS_FAILED
    assert run_gate(pytester, "def test_plain(): pass").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run_gate(pytester, WINDOW + "pass", "--collect-only").ret == pytest.ExitCode.OK


def test_a_run_without_the_gate_needs_none(pytester):
    make_suite(pytester, "def test_plain(): pass\n@pytest.mark.numerics\ndef test_numerics(): pass")
    assert pytester.runpytest_inprocess().ret == pytest.ExitCode.OK


def test_a_dry_run_needs_its_plan_and_nothing_else(pytester):
    plan = WINDOW + "evidence.add({'type': 'plan', 'steps': ['stop the unit', 'capture']})"
    result = run_gate(pytester, plan, "--dry-run")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*1. stop the unit", "*nothing was stopped or measured*"])
    assert_not_green(run_gate(pytester, WINDOW + "pass", "--dry-run"), "no plan")


NUMERICS = """
@pytest.mark.numerics(level="capture")
def test_capture(evidence): {capture}

@pytest.mark.numerics(level="kernel")
def test_kernel(evidence): {kernel}

@pytest.mark.gpu
@pytest.mark.numerics(level="kernel-gpu")
def test_gpu(): pytest.skip("no GPU")
"""


def agree(level: str) -> str:
    return f"evidence.add({{'type': 'agreement', 'level': '{level}', 'error': 1e-4}})"


@pytest.mark.parametrize(
    ("capture", "kernel", "problem"),
    [
        (agree("capture"), agree("kernel"), None),
        (agree("capture"), "pass", "no agreement was recorded for the numerics level kernel"),
        (agree("capture"), "pytest.skip('x')", "no agreement was recorded for the numerics level kernel"),
        ("pytest.skip('x')", "pytest.skip('x')", "all 3 numerics tests were skipped"),
    ],
)
def test_each_numerics_level_must_agree(pytester, capture, kernel, problem):
    make_suite(pytester, NUMERICS.format(capture=capture, kernel=kernel), "tests_numerics/test_inner.py")
    for options in (["-m", "numerics"], ["tests_numerics"]):
        result = pytester.runpytest_inprocess(*options)
        if problem is None:
            assert result.ret == pytest.ExitCode.OK
        else:
            assert_not_green(result, problem)


def test_numerics_without_a_level_need_one_agreement(pytester):
    make_suite(pytester, "@pytest.mark.numerics\ndef test_x(evidence): pass")
    assert_not_green(
        pytester.runpytest_inprocess("-m", "numerics"), "the numerics tests recorded no agreement"
    )
    make_suite(pytester, f"@pytest.mark.numerics\ndef test_x(evidence): {agree('any')}")
    assert pytester.runpytest_inprocess("-m", "numerics").ret == pytest.ExitCode.OK


def test_one_numerics_test_by_name_and_a_plain_run_are_not_judged(pytester):
    make_suite(pytester, NUMERICS.format(capture="pass", kernel="pass"), "tests_numerics/test_inner.py")
    assert (
        pytester.runpytest_inprocess("tests_numerics/test_inner.py::test_capture").ret == pytest.ExitCode.OK
    )
    assert pytester.runpytest_inprocess().ret == pytest.ExitCode.OK


def test_a_gpu_level_is_demanded_when_it_is_named(pytester):
    make_suite(pytester, NUMERICS.format(capture="pass", kernel="pass"))
    assert_not_green(
        pytester.runpytest_inprocess("-m", "numerics and gpu"), "all 1 numerics tests were skipped"
    )


def test_records_are_written_as_they_happen_and_runs_append(pytester):
    body = WINDOW + "evidence.add(VERDICT | {'sentence': 'first'})\n    import os; os._exit(9)"
    make_suite(pytester, body)
    pytester.runpytest_subprocess("-m", "gpu_window")
    path = pytester.path / ".taugate/reports/results.jsonl"
    (killed,) = read_results(path)
    assert (killed["type"], killed["sentence"], killed["schema_version"]) == ("verdict", "first", 1)

    result = run_gate(pytester, WINDOW + "evidence.add(VERDICT); evidence.add(NOT_NEEDED)")
    assert result.ret == pytest.ExitCode.OK
    records = read_results(path)
    assert [record["type"] for record in records] == ["verdict", "window", "run"]
    assert records[-1]["exit_status"] == 0
    assert read_results(path, run=killed["run"]) == [killed]


def test_the_last_record_says_how_the_run_ended(pytester):
    run_gate(pytester, WINDOW + "evidence.add(VERDICT)")
    end = read_results(pytester.path / ".taugate/reports/results.jsonl")[-1]
    assert end["exit_status"] == 1
    assert end["problems"] == ["no window was recorded, neither opened nor found unnecessary"]


def test_workers_send_their_records_to_the_controller(pytester):
    body = "".join(
        f"@pytest.mark.numerics(level='l{number}')\ndef test_{number}(evidence): {agree(f'l{number}')}\n"
        for number in range(6)
    )
    make_suite(pytester, body)
    result = pytester.runpytest_subprocess("-n", "2", "-m", "numerics")
    assert result.ret == pytest.ExitCode.OK
    records = read_results(pytester.path / ".taugate/reports/results.jsonl")
    assert sorted(record["level"] for record in records if record["type"] == "agreement") == [
        f"l{number}" for number in range(6)
    ]
    assert len({record["run"] for record in records}) == 1


def test_a_worker_that_dies_takes_its_evidence_with_it(pytester):
    body = f"@pytest.mark.numerics\ndef test_x(evidence):\n    {agree('any')}\n    import os; os._exit(9)"
    make_suite(pytester, body)
    assert pytester.runpytest_subprocess("-n", "1", "-m", "numerics").ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    "record",
    [{}, {"type": "guess"}, {"type": "verdict", "tau": float("nan")}, {"type": "verdict", "x": object()}],
)
def test_a_malformed_record_is_refused_and_not_written(tmp_path, record):
    writer = ResultsWriter(tmp_path / "results.jsonl")
    with pytest.raises(EvidenceError):
        writer.append(record)
    assert not writer.path.exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot read results"),
        ("", "holds no records"),
        ('{"schema_version": 1', "line 1 is not a results record"),
        (json.dumps({"schema_version": 99, "run": "a"}), "schema version 99"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "results.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EvidenceError, match=sentence):
        read_results(path)
