"""A signal during a test: teardown runs, JUnit is written, exit code 2; more of them break nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import xmlschema

from taugate.polling import poll
from tests_infra.inner import make_suite

SCHEMA = Path(__file__).parent / "data" / "junit.xsd"
SUITE = """
import threading
from pathlib import Path

def wait_for(name):
    while not Path(name).exists():  # ends with the file or with a signal
        threading.Event().wait(0.02)

@pytest.fixture(scope="session")
def server():
    Path("stopped").touch()
    yield
    Path("restoring").touch()
    if Path("slow").exists():
        wait_for("go on")
    open("restored", "w")  # what an interrupted run leaves open must not change its exit code

@pytest.fixture
def slow_setup(server):
    Path("running").touch()
    wait_for("never")

@pytest.fixture
def window():  # opened, used and closed inside one setup, as the gate's is
    Path("running").touch()
    try:
        wait_for("never")
    finally:
        Path("restoring").touch()
        wait_for("never")

@pytest.mark.gpu_window
def test_first(server): pass

@pytest.mark.gpu_window
def test_long(server):
    Path("running").touch()
    wait_for("never")

def test_setup(slow_setup): pass

@pytest.mark.gpu_window
def test_borrowed(window): pass
"""


class Inner:
    """pytest in a process of its own, in the directory of the suite."""

    def __init__(self, directory: Path, *options: str, preexec=None) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "pytest", "--junitxml=out.xml", *options]
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=preexec,
        )

    def wait_for(self, name: str) -> None:
        poll(
            lambda: (self.directory / name).exists(),
            deadline=30,
            what=f"file {name} of the inner run",
            interval=0.02,
        )

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output

    def left(self, name: str) -> bool:
        return (self.directory / name).exists()


@pytest.fixture
def inner(pytester):
    made: list[Inner] = []

    def start(*options: str, preexec=None) -> Inner:
        make_suite(pytester, SUITE)
        made.append(Inner(pytester.path, *options, preexec=preexec))
        return made[-1]

    yield start
    for run in made:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_tears_down_writes_the_report_and_exits_with_2(inner, number):
    run = inner("-m", "gpu_window")
    run.wait_for("running")
    run.process.send_signal(number)
    code, output = run.finish()
    assert code == pytest.ExitCode.INTERRUPTED, output
    assert run.left("restored")
    assert f"taugate: {number.name}: stopping" in output
    xmlschema.validate(run.directory / "out.xml", SCHEMA)
    cases = {case.get("name"): case for case in ElementTree.parse(run.directory / "out.xml").iter("testcase")}
    assert cases["test_first"].find("error") is None
    assert "interrupted" in cases["test_long"].find("error").get("message")


def test_a_signal_during_setup_tears_down_what_was_set_up(inner):
    run = inner("-k", "test_setup")
    run.wait_for("running")
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code == pytest.ExitCode.INTERRUPTED, output
    assert run.left("restored")


def test_more_signals_during_the_restore_say_so_and_change_nothing(inner, pytester):
    (pytester.path / "slow").touch()
    run = inner("-m", "gpu_window")
    run.wait_for("running")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("restoring")
    seen = []
    for number in (signal.SIGTERM, signal.SIGINT):
        run.process.send_signal(number)
        seen.append(_read_until(run, f"{number.name}: the server is being restored"))
    assert "at its deadline (window.ttl)" not in seen[0]
    assert f"kill -9 {run.process.pid}" in seen[1]
    assert "restores the server by itself at its deadline (window.ttl)" in seen[1]
    (pytester.path / "go on").touch()
    code, output = run.finish()
    assert code == pytest.ExitCode.INTERRUPTED, output
    assert run.left("restored")
    assert run.left("out.xml")


def test_a_second_ctrl_c_leaves_the_restore_to_the_host_and_says_so(inner):
    run = inner("-m", "gpu_window", "-k", "test_borrowed")
    run.wait_for("running")
    run.process.send_signal(signal.SIGINT)
    assert "Ctrl-C once more leaves that to its host" in _read_until(run, "SIGINT: stopping")
    run.wait_for("restoring")
    run.process.send_signal(signal.SIGTERM)
    _read_until(run, "SIGTERM: the server is being restored, please wait")
    run.process.send_signal(signal.SIGINT)
    said = _read_until(run, "SIGINT once more: leaving")
    assert "the dead-man timer on the host stays armed" in said and "at its deadline (window.ttl)" in said
    code, output = run.finish()
    assert code == pytest.ExitCode.INTERRUPTED, output
    assert run.left("out.xml")


def _read_until(run: Inner, text: str) -> str:
    """The line with `text`; the test's own time limit ends the wait for one that never comes."""
    for line in run.process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the inner run ended without saying {text!r}")


def test_without_the_window_a_second_interrupt_leaves_at_once(inner, pytester):
    (pytester.path / "slow").touch()
    run = inner("-k", "test_setup")
    run.wait_for("running")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("restoring")
    run.process.send_signal(signal.SIGINT)
    run.finish()
    assert not run.left("restored")


def test_a_signal_to_the_controller_of_xdist_ends_in_order(inner):
    run = inner("-n", "1", "-k", "test_setup")
    run.wait_for("running")
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code == pytest.ExitCode.INTERRUPTED, output
    assert run.left("out.xml")


def test_what_nohup_ignores_stays_ignored(inner):
    run = inner("-m", "gpu_window", preexec=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    run.wait_for("running")
    run.process.send_signal(signal.SIGHUP)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code == pytest.ExitCode.INTERRUPTED
    assert "SIGHUP" not in output


def test_handlers_are_given_back(pytester):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    body = "import signal\ndef test_x(): assert 'Interrupts' in repr(signal.getsignal(signal.SIGTERM))"
    make_suite(pytester, body)
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
