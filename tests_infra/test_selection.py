"""Which command selects what, arms what, and is refused: the table "Selection and arming" of the design."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from fixtures.selection import armed, gate_selected, names_mark
from tests_infra.inner import PROJECT, make_suite

SUITE = """
def test_plain(): pass

@pytest.mark.gpu_window
def test_window(evidence, pytestconfig):
    evidence.add(NOT_NEEDED)
    evidence.add(VERDICT)

@pytest.mark.drafter
@pytest.mark.gpu_window
def test_both(): pass

@pytest.mark.drafter
def test_drafter(): pass
"""


def fake(markexpr: str, window: str = "auto") -> SimpleNamespace:
    return SimpleNamespace(option=SimpleNamespace(markexpr=markexpr, window=window))


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("", False),
        ("gpu_window", True),
        ("not gpu_window", False),
        ("gpu_window or drafter", True),
        ("gpu_window and not slow", True),
        ("not (not gpu_window)", True),
        ("not drafter", False),
        ("drafter", False),
        ("drafter and not gpu_window", False),
        ("gpu_window or not gpu_window", False),
        ("numerics(level='gpu_window')", False),
        ("gpu_window and (", False),
    ],
)
def test_a_mark_is_named_only_if_it_makes_a_difference_for_the_better(expression, named):
    assert names_mark(fake(expression), "gpu_window") is named


@pytest.mark.parametrize(
    ("expression", "window", "arms"),
    [
        ("gpu_window", "auto", True),
        ("gpu_window", "never", False),
        ("not gpu_window", "auto", False),
        ("drafter", "auto", False),
        ("drafter", "always", True),
        ("", "auto", False),
    ],
)
def test_a_window_must_be_asked_for(expression, window, arms):
    config = fake(expression, window)
    assert armed(config) is arms
    assert gate_selected(config) is (expression == "gpu_window")


def test_plain_pytest_leaves_the_window_tests_out(pytester):
    make_suite(pytester, SUITE)
    result = pytester.runpytest_inprocess("-v")
    result.assert_outcomes(passed=2, deselected=2)


def test_the_mark_on_the_command_line_replaces_the_configured_one(pytester):
    make_suite(pytester, SUITE)
    pytester.runpytest_inprocess("-m", "gpu_window").assert_outcomes(passed=2, deselected=2)


def test_window_tests_run_first(pytester):
    make_suite(pytester, SUITE)
    result = pytester.runpytest_inprocess("-v", "-m", "gpu_window or drafter")
    result.stdout.fnmatch_lines(["*::test_window PASSED*", "*::test_both PASSED*", "*::test_drafter PASSED*"])


@pytest.mark.parametrize("options", [["-m", "gpu_window"], ["-m", "drafter", "--window", "always"]])
def test_the_window_refuses_several_processes_in_one_sentence(pytester, options):
    make_suite(pytester, SUITE)
    result = pytester.runpytest_subprocess("-n", "2", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        "ERROR: tests marked gpu_window share one host and run in one process: leave out -n, "
        'or deselect them with -m "not gpu_window"'
    ]


def test_several_processes_are_fine_without_the_window(pytester):
    make_suite(pytester, SUITE)
    pytester.runpytest_subprocess("-n", "2").assert_outcomes(passed=2)
    pytester.runpytest_subprocess("-n", "0", "-m", "gpu_window").assert_outcomes(passed=2, deselected=2)


@pytest.mark.parametrize("expression", ["gpu_windw", "gpu_window or numeric"])
def test_a_mistyped_mark_is_an_error(pytester, expression):
    make_suite(pytester, SUITE)
    result = pytester.runpytest_inprocess("-m", expression)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*Unknown marker*"])


def test_an_unregistered_mark_on_a_test_is_an_error(pytester):
    make_suite(pytester, "@pytest.mark.gpu_windw\ndef test_x(): pass\n")
    assert pytester.runpytest_inprocess().ret == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--set", "completions.limit"], "--set takes KEY=VALUE"),
        (["--set", "completions.limt=3"], "did you mean completions.limit?"),
        (["--profile", "box"], "there is no profile 'box'"),
        (["--gate-config", "absent.toml"], "there is no configuration file"),
    ],
)
def test_an_unusable_option_is_one_sentence(pytester, options, sentence):
    make_suite(pytester, SUITE)
    result = pytester.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert sentence in "\n".join(result.errlines)


def test_the_header_shows_values_with_their_source(pytester, monkeypatch):
    make_suite(pytester, SUITE)
    (pytester.path / "gate.toml").write_text("[completions]\nlimit = 8\n")
    monkeypatch.setenv("TAUGATE_STATISTICS_SEED", "3")
    result = pytester.runpytest_inprocess("--drafter", "a", "--drafter", "b", "--reference", "c")
    result.stdout.fnmatch_lines(
        [
            "taugate: profile=embedded (default)",
            "taugate: completions.limit=8 (gate.toml)",
            "taugate: drafters.candidate=a, b (command line)",
            "taugate: drafters.reference=c (command line)",
            "taugate: statistics.seed=3 (environment)",
        ]
    )


def test_the_fixture_gives_absolute_paths(pytester):
    make_suite(
        pytester,
        """
def test_x(gate_config, pytestconfig):
    here = pytestconfig.invocation_params.dir
    assert gate_config.drafters.candidate == (here / "a", here / "b")
    assert gate_config.report.dir == here / ".taugate/reports"
""",
    )
    pytester.runpytest_inprocess("--drafter", "a", "--drafter", "b").assert_outcomes(passed=1)


def test_help_works_with_a_broken_configuration(pytester):
    make_suite(pytester, SUITE)
    (pytester.path / "gate.toml").write_text("x = ")
    result = pytester.runpytest_inprocess("--help")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*--drafter=PATH*", "*--dry-run*"])


@pytest.mark.parametrize("options", [["--help"], ["--collect-only", "-q", "tests_infra/test_config.py"]])
def test_help_and_collection_import_nothing_heavy(options):
    script = (
        "import sys, pytest; pytest.main(sys.argv[1:]); "
        "print('HEAVY', sorted({'torch', 'transformers', 'paramiko', 'scipy', 'fla'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *options],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stdout[-2000:] + done.stderr[-2000:]


def test_a_path_elsewhere_after_an_option_is_one_sentence_or_works(tmp_path):
    """pytest takes "--drafter /elsewhere" for tests of another directory, and reads no pytest.ini; where the package is
    not installed beside, it does not even know the option.
    """
    checkpoint = tmp_path / "step_1000"
    checkpoint.mkdir()
    command = [sys.executable, "-m", "pytest", "-m", "gpu_window", "--collect-only", "-q", "-p", "no:cacheprovider"]
    apart, joined = (
        subprocess.run([*command, *option], cwd=PROJECT, capture_output=True, text=True, check=False)
        for option in (["--drafter", str(checkpoint)], [f"--drafter={checkpoint}"])
    )
    assert apart.returncode == 4 and "Traceback" not in apart.stdout + apart.stderr
    said = apart.stdout + apart.stderr
    assert "--drafter=PATH" in said or "unrecognized arguments: --drafter" in said
    assert joined.returncode == 0, joined.stdout
