"""A run that is told to end in the middle of its window gives the host back, writes JUnit and exits with 2."""

from __future__ import annotations

import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree

import pytest

from taugate.polling import poll
from tests_infra.gatehost import ROOT, gate_command, stub_host


@pytest.mark.parametrize(("name", "phase"), [("SIGTERM", "held"), ("SIGINT", "stopped")])
def test_the_host_serves_again_and_exit_is_2(tmp_path, name, phase):
    junit = tmp_path / "gate.xml"
    with stub_host(tmp_path / "host") as host:
        before = host.show()["InvocationID"]
        command = gate_command(host, tmp_path / "store", f"--junitxml={junit}")
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            seen = _read_until(run, f"  {phase} ")
            run.send_signal(getattr(signal, name))
            rest = run.communicate(timeout=90)[0]
        assert run.returncode == 2, seen + rest
        assert host.show()["ActiveState"] == "active", "the server must run again"
        assert host.show()["InvocationID"] != before, "it was really stopped in between"
        assert host.request("/ready")[0] == 200
        assert host.systemctl("is-active", "taugate-window.timer").returncode != 0, "the dead-man is disarmed"
        assert (
            host.systemctl("list-units", "--all", "--plain", "--no-legend", "taugate-job-*.service").stdout.strip()
            == ""
        )
        assert "restored" in rest
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None and suite.get("errors") == "1", "an interrupted run never looks like a pass"
    assert "interrupted" in suite.findall("testcase")[0].find("error").get("message")


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_and_the_host_restores_by_itself(tmp_path):
    junit = tmp_path / "gate.xml"
    with stub_host(tmp_path / "host", faults=["slow-start=4"]) as host:
        command = gate_command(host, tmp_path / "store", f"--junitxml={junit}", "--set", "window.ttl=8s")
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            seen = _read_until(run, "  held ")
            run.send_signal(signal.SIGINT)
            seen += _read_until(run, "  starting ")
            run.send_signal(signal.SIGINT)
            seen += run.communicate(timeout=30)[0]
        assert run.returncode == 70, seen
        assert "Ctrl-C once more leaves that to its host" in seen
        assert "SIGINT once more: leaving; the dead-man timer on the host stays armed" in seen
        assert "interrupted twice" in seen and "NOT GIVEN BACK" in seen
        assert host.systemctl("is-active", "taugate-window.timer").returncode == 0, "the dead-man is disarmed"
        host.wait_ready(60)
        poll(lambda: host.systemctl("is-active", "taugate-window.timer").returncode, deadline=30, what="its end")
    assert ElementTree.parse(junit).getroot().find("testsuite").get("errors") == "1"


def _read_until(run: subprocess.Popen[str], text: str) -> str:
    seen, end = "", time.monotonic() + 90
    assert run.stdout is not None
    while text not in seen:
        line = run.stdout.readline()
        assert line and time.monotonic() < end, f"the run ended or hung before {text!r}:\n{seen}"
        seen += line
    return seen
