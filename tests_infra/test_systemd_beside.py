"""A capture beside the running server, on a real systemd: the server comes first, whatever happens to the job."""

from __future__ import annotations

import threading
import time

import pytest

from fixtures.testhost.host import SERVICE, SystemdHost
from fixtures.testhost.needed import need_host
from taugate.errors import LeaseLost, WindowError
from taugate.host.beside import BesideWindow, Ceiling, choose
from taugate.host.gpus import Gpu
from taugate.host.host import connect
from taugate.host.record import WindowSettings
from taugate.host.window import Window
from taugate.polling import poll

ROOM = Ceiling(mib=1000, spare_mib=100, patience_s=1.0)
LONG = ["sh", "-c", "echo working; exec sleep 30"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    need_host()
    with SystemdHost(tmp_path_factory.mktemp("host") / "h") as host:
        yield host


@pytest.fixture
def host(shared):
    shared.inside("systemctl", "start", SERVICE)
    shared.wait_serving()
    yield shared
    assert shared.inside("systemctl", "list-units", "--all", "--no-legend", "taugate-*").stdout == ""


@pytest.fixture
def reached(host):
    with connect(host.settings()) as reached:
        yield reached


def window_on(reached, ceiling=ROOM, **settings):
    return BesideWindow(reached, WindowSettings((1, 2, 3), **({"ttl_s": 20.0} | settings)), ceiling)


def hold(mib):
    code = "import sys; sys.path.insert(0, '/opt/testhost'); from pathlib import Path; import time; "
    code += f"from fixtures.embedded import gpus; held = gpus.hold(Path('/dev'), {mib}, 0); print(1, flush=True); "
    return ["/usr/bin/python3", "-c", code + "time.sleep(30)"]


def once(action):
    """For on_line: do it at the first line, in a thread of its own as an operator would."""
    threads = []

    def on_line(_):
        if not threads:
            threads.append(threading.Thread(target=action))
            threads[0].start()

    return on_line


def test_the_server_serves_all_the_time_and_nobody_else_gets_the_host(host, reached):
    before, served = host.show()["InvocationID"], []

    def look():
        served.append(host.serves())
        with pytest.raises(WindowError, match="in use by `taugate window") as refused:
            Window(reached, WindowSettings((1, 2, 3))).open()
        served.append(str(refused.value))

    window = window_on(reached)
    with window:
        script = "echo $CUDA_VISIBLE_DEVICES; sleep 1; exit 3"
        done = window.run_job(["sh", "-c", script], deadline_s=20, on_line=lambda _: look())
    assert done.rc == 3 and done.stdout.strip() == window.gpu.uuid
    assert served[0] is True and window.settings.window_id in served[1]
    assert host.show()["InvocationID"] == before
    assert window.record.outcome == "beside" and window.record.downtime_s is None
    assert [event.phase.value for event in window.record.phases] == ["serving", "leased", "held", "serving"]


def test_a_job_over_its_ceiling_is_ended_and_its_memory_is_free_again(host, reached):
    before = host.show()["InvocationID"]
    window = window_on(reached)
    over = "over the ceiling of 1000 MiB .*48504 MiB, 47004 before.*max_gpu_memory"
    with pytest.raises(WindowError, match=over), window:
        window.run_job(hold(1500), deadline_s=25)
    assert {gpu.used_mib for gpu in reached.gpus().gpus} == {47004}
    assert host.show()["InvocationID"] == before and host.serves() and window.record.outcome == "beside"


@pytest.mark.parametrize("verb", ["stop", "restart"])
def test_an_operator_may_stop_or_restart_the_server_and_the_job_goes(host, reached, verb):
    took = []

    def operate():
        begun = time.monotonic()
        assert host.inside("systemctl", verb, SERVICE).returncode == 0
        took.append(time.monotonic() - begun)

    window = window_on(reached)
    with pytest.raises(WindowError, match="for the server's sake: somebody stopped or restarted"), window:
        window.run_job(hold(900) if verb == "stop" else LONG, deadline_s=25, on_line=once(operate))
    assert took and took[0] < 6, "the job was in the operator's way"
    assert window.record.outcome == "beside" and f"{verb}" in window.record.notes[0]
    assert reached.unit.show().active == ("inactive" if verb == "stop" else "active")


def test_a_server_that_hangs_ends_the_job(host, reached):
    pid = host.show(SERVICE, "MainPID")["MainPID"]
    window = window_on(reached)
    with window:
        with pytest.raises(WindowError, match="for the server's sake: sglang.service is not healthy any more"):
            window.run_job(LONG, deadline_s=25, on_line=once(lambda: host.inside("kill", "-STOP", pid)))
        host.inside("kill", "-CONT", pid)
    assert window.record.outcome == "beside" and host.serves()


def test_a_server_that_crashes_meanwhile_is_an_alarm(host, reached, tmp_path):
    window = window_on(reached, notify=("sh", "-c", f'echo "$0" >{tmp_path}/told'))
    crash = once(lambda: host.inside("systemctl", "kill", "--signal=SIGKILL", SERVICE))
    with pytest.raises(WindowError, match="not well after a capture beside it: it ended by itself") as caught, window:
        window.run_job(LONG, deadline_s=25, on_line=crash)
    assert "for the server's sake" in str(caught.value.__context__)
    assert window.record.outcome == "broken" and (tmp_path / "told").read_text().strip() == window.record.error


def test_without_its_client_the_host_ends_the_job_and_leaves_the_server_alone(host, reached):
    before = host.show()["InvocationID"]
    window = window_on(reached, ttl_s=3.0)
    window.open()
    window._renewer.stop()
    with pytest.raises(LeaseLost):
        window.run_job(LONG, deadline_s=25)
    with pytest.raises(LeaseLost):
        window.close()
    assert host.show()["InvocationID"] == before and host.serves()


def test_the_host_does_not_start_a_server_that_an_operator_has_stopped(host, reached):
    window = window_on(reached, ttl_s=1.0)
    window.open()
    window._renewer.stop()
    host.inside("systemctl", "stop", SERVICE)
    gone = lambda: host.show("taugate-window.timer")["LoadState"] == "not-found"  # noqa: E731
    poll(gone, deadline=10, what="the end of the lease")
    with pytest.raises(LeaseLost):
        window.close()
    assert reached.unit.show().active == "inactive"


def gpu(index, used):
    return Gpu(index, f"GPU-{index}", "A", used, 48000, "[N/A]")


def test_the_gpu_with_the_most_room_and_never_the_last_of_it():
    gpus = [gpu(0, 47000), gpu(1, 40000)]
    assert choose(gpus, Ceiling(mib=4000), "box") == (gpus[1], 4000)
    assert choose(gpus, Ceiling(), "box") == (gpus[1], 8000 - 2048)
    for ceiling in (Ceiling(mib=6000), Ceiling(spare_mib=8000)):
        with pytest.raises(WindowError, match="GPU 1 of box has 8000 MiB free beside the server, too little for"):
            choose(gpus, ceiling, "box")
