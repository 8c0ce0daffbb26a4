"""The window against a host in memory: whatever fails, and whenever, the server comes back or the dead-man
stays armed.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taugate.errors import DeadlineError, HostError, JobError, LeaseLost, WindowError
from taugate.host.host import Host, HostSettings
from taugate.host.renewer import Renewer
from taugate.host.transport import Completed
from taugate.host.window import Phase, Window, WindowSettings
from tests_infra import fakehost
from tests_infra.fakehost import SERVICE, FakeTransport, World, fake_host

FAULTS = ["rc1", "lost", "lost-after", "host-error", "host-error-after", "ctrl-c", "ctrl-c-after", "exit",
          "exit-after",
          "bug", "bug-after"]  # fmt: skip
VALUES = WindowSettings((1, 2, 3), window_id="w1", owner="me@here", persist_s=10)


def window_on(world, on_event=None, **changes):
    return Window(fake_host(world), replace(VALUES, **changes), on_event, clock=world.clock, sleep=world.sleep)


def use(world, window):
    """Open, run a job, close; returns what was raised."""
    try:
        with window:
            window.run_job(["work"], deadline_s=60)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return error
    return None


def assert_safe(world, window):
    assert world.violations == []
    record = window.record
    served = world.serving and not world.armed
    guarded = record.outcome == "broken" and (world.armed or "dead-man fired" in world.log)
    # An arming whose answer never came may leave an armed timer beside a server that nobody stopped: a no-op.
    untouched = "stop" not in world.log and world.serving
    assert served or guarded or untouched, (world.log, record)
    assert window._renewer.stopped or record.outcome == ""
    if "stop" in world.log:
        assert record.outcome in ("restored", "broken")
    if record.outcome == "restored" and "disarm" in world.log:
        assert world.log.index("disarm") == len(world.log) - 1


def test_a_window_without_trouble():
    world, seen = World(), []
    window = window_on(world, seen.append)
    with window:
        assert window.phase is Phase.HELD and world.used_mib() < 1024
        assert window.run_job(["work"], deadline_s=60).stdout == "done\n"
    names = ["serving", "leased", "stopped", "free", "held", "starting", "serving"]
    assert [event.phase.value for event in seen] == names
    assert world.log == ["arm", "stop", "job", "start", "disarm"]
    record = window.record.to_json()
    assert record["outcome"] == "restored" and record["canary"]["same"] and record["escalations"] == []
    assert record["gpus_before_mib"] == record["gpus_after_mib"] == {"GPU-a": 47004} and record["notes"] == []
    assert 3 < record["downtime_s"] < 60 and record["identity_before"] == record["identity_after"]
    window.close()
    assert world.log[-1] == "disarm"
    with pytest.raises(WindowError, match="holds no GPUs"):
        window.run_job(["work"], deadline_s=1)
    with pytest.raises(WindowError, match="make a new one"):
        window.open()


def count_steps():
    world = World()
    use(world, window_on(world))
    return world.steps


STEPS = count_steps()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_single_fault_at_every_step(fault):
    for step in range(STEPS + 5):
        world = World()
        world.faults = {step: fault}
        window = window_on(world)
        error = use(world, window)
        assert_safe(world, window)
        if error is None:
            assert window.record.outcome == "restored"
        if not fault.startswith(("bug", "exit")):  # one thing that the host or the network does is survived
            assert window.record.outcome in ("", "restored") and world.serving, (step, window.record)
            assert window.record.lease_lost == ""
        if fault.startswith("ctrl-c") and step < STEPS:
            assert isinstance(error, KeyboardInterrupt) and world.serving
            assert window.record.outcome in ("", "restored")


@settings(max_examples=300, deadline=None)
@given(
    faults=st.dictionaries(st.integers(0, STEPS * 2), st.sampled_from(FAULTS), max_size=5),
    leftover=st.booleans(),
    killable=st.booleans(),
    starts_fail=st.booleans(),
    changed=st.booleans(),
)
def test_any_faults_in_any_world(faults, leftover, killable, starts_fail, changed):
    world = World()
    world.faults, world.leftover, world.killable = faults, leftover, killable

    def later(event):
        if event.phase is Phase.STOPPED:
            world.starts_fail = starts_fail
            world.model_path = "/models/other" if changed else world.model_path

    window = window_on(world, later)
    use(world, window)
    assert_safe(world, window)
    world.starts_fail = False
    world.faults = {}
    world.advance(VALUES.ttl_s + 20)  # the client is dead now: what does the host do by itself?
    assert world.serving


@pytest.mark.parametrize("late", [n / 200 for n in range(60)] + [1, 2, 5, 9, 13])
def test_a_stop_that_the_host_gets_round_to_after_the_interrupt(late):
    reference = World()
    window_on(reference).open()
    stop_step = next(step for step, name in enumerate(reference.names) if name.startswith("taugate-host stop"))
    world = World()
    world.faults = {stop_step: f"ctrl-c-late-{late}"}
    window = window_on(world)
    assert isinstance(use(world, window), KeyboardInterrupt)
    assert window.record.outcome == "restored"
    world.advance(20)
    assert_safe(world, window)
    assert world.serving and not world.armed


@pytest.mark.parametrize("phase", list(Phase))
def test_ctrl_c_in_the_progress_callback(phase):
    world = World()

    def interrupt(event):
        if event.phase is phase:
            interrupt_once.append(event)
            if len(interrupt_once) == 1:
                raise KeyboardInterrupt

    interrupt_once = []
    window = window_on(world, interrupt)
    error = use(world, window)
    assert isinstance(error, KeyboardInterrupt) or phase is Phase.BROKEN
    assert_safe(world, window)
    assert world.serving


def test_an_error_in_the_progress_callback_is_noted_only():
    world = World()

    def bad(event):
        raise ValueError("no terminal")

    window = window_on(world, bad)
    assert use(world, window) is None
    assert window.record.outcome == "restored" and "no terminal" in window.record.notes[0]


def test_a_second_interrupt_leaves_the_restore_to_the_host():
    world = World()
    window = window_on(world)
    window.open()
    world.faults = {world.steps + 2: "ctrl-c", world.steps + 4: "ctrl-c"}
    with pytest.raises(KeyboardInterrupt) as caught:
        window.close()
    assert window.record.outcome == "broken" and world.armed
    note = caught.value.__notes__[0]
    assert "interrupted twice" in note and "the host starts it by itself within 600 s" in note
    assert "by hand: `ssh root@fake systemctl start sglang-fake.service`" in note
    world.advance(700)
    assert world.serving


def test_memory_that_stays_is_freed_by_killing_the_unit_s_leftovers():
    world = World()
    world.leftover = True
    window = window_on(world)
    assert use(world, window) is None
    assert world.log == ["arm", "stop", "kill", "job", "start", "disarm"]
    assert window.record.escalations == [
        "SIGKILL to what was left in the control group of sglang-fake.service (pids 101; exit status 0)"
    ]


def test_memory_that_cannot_be_freed_gives_the_server_back():
    world = World()
    world.leftover, world.killable = True, False
    window = window_on(world)
    error = use(world, window)
    assert isinstance(error, WindowError) and "were not free 120 s after" in str(error) and "pid 101" in str(error)
    assert window.record.outcome == "restored" and "job" not in world.log and world.serving
    # It was in the snapshot and in the control group, with the same start time: then it may be killed by pid
    # too.
    assert world.log == ["arm", "stop", "kill", "kill -KILL 101", "start", "disarm"]


def test_another_model_after_the_start_is_broken_and_stays_guarded():
    world = World()
    window = window_on(world, lambda event: setattr(world, "model_path", "/x") if event.phase is Phase.HELD else None)
    error = use(world, window)
    assert isinstance(error, WindowError)
    assert "model_path was '/models/m' and is '/x'" in str(error) and "stays armed" in str(error)
    assert window.record.outcome == "broken" and world.armed


def test_a_host_that_is_in_use_is_left_alone():
    world = World()
    world.timer = ("taugate window w0 bob@lab", world.now + 1e6, 1e6)
    window = window_on(world)
    error = use(world, window)
    assert isinstance(error, WindowError) and "in use by `taugate window w0 bob@lab`" in str(error)
    assert world.log == [] and world.armed and window.record.phases == []


def test_another_client_may_be_faster_by_a_moment():
    world = World()
    other = ("taugate window w0 bob@lab", world.now + 1e6, 1e6)
    window = window_on(world, lambda event: setattr(world, "timer", other) if not window._opened else None)
    error = use(world, window)
    assert isinstance(error, WindowError) and "in use by `taugate window w0 bob@lab`" in str(error)
    assert world.log == [] and world.timer == other and window.record.outcome == "restored"


def answer_job(world, rc, seconds=1.0, then=lambda: None):
    """Let the next job end with `rc` after `seconds`, and something happen to the host meanwhile."""
    real = FakeTransport.run

    class Transport(FakeTransport):
        def run(self, argv, *, deadline, input=None, on_line=None):
            if "job" in argv:
                then()
                return Completed(tuple(argv), rc, "", "", seconds, "fake")
            return real(self, argv, deadline=deadline, input=input, on_line=on_line)

    return Host(HostSettings(SERVICE, host="fake", user="root"), Transport(world))


@pytest.mark.parametrize(
    ("rc", "seconds", "kind", "message"),
    [
        (None, 1.0, JobError, "job 1 of window w1 on fake ended without an exit status"),
        (1, 60.0, DeadlineError, "was ended by systemd after 60 s: raise `window.job_timeout`"),
        (3, 1.0, None, ""),
    ],
)
def test_how_a_job_may_end(rc, seconds, kind, message):
    world = World()
    with Window(answer_job(world, rc, seconds), VALUES, clock=world.clock, sleep=world.sleep) as window:
        if kind is None:
            assert window.run_job(["work"], deadline_s=60).rc == 3
        else:
            with pytest.raises(kind, match=message):
                window.run_job(["work"], deadline_s=60)
    assert window.record.outcome == "restored" and world.serving and not world.armed


def test_an_operator_s_start_ends_the_job_and_is_named_as_the_reason():
    world = World()

    def operator():
        world.start()
        world.advance(2)

    window = Window(answer_job(world, 143, then=operator), VALUES, clock=world.clock, sleep=world.sleep)
    error = use(world, window)
    assert isinstance(error, LeaseLost) and "was started by somebody else" in str(error)
    assert window.record.outcome == "restored" and world.serving and not world.armed


class Renewals:
    """Stands in for a Lease: each renewal takes the next answer, the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.count = list(answers), 0

    def renew(self):
        answer = self.answers[min(self.count, len(self.answers) - 1)]
        self.count += 1
        if answer:
            raise answer


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_renewals_go_on_until_the_lease_is_lost_for_sure():
    lease = Renewals(None, None, HostError("no route"), None, LeaseLost("gone"))
    renewer = Renewer(lease, 0.15)
    renewer.start()
    wait_for(lambda: renewer.lost)
    assert (lease.count, renewer.lost) == (5, "gone")
    renewer.stop()

    unreachable = Renewer(Renewals(HostError("no route")), 0.15)
    unreachable.start()
    wait_for(lambda: unreachable.lost)
    assert "could not be renewed for 0.15 s (no route)" in unreachable.lost
    unreachable.stop()

    taken = Renewer(Renewals(None), 0.15, watch=lambda: "started by somebody else")
    taken.start()
    wait_for(lambda: taken.lost == "started by somebody else")
    taken.stop()
    assert taken.stopped


def test_a_frozen_client_finds_out_that_its_lease_is_gone():
    world = World()
    window = window_on(world)
    window.open()
    world.advance(700)
    assert "dead-man fired" in world.log and world.serving
    with pytest.raises(LeaseLost):
        window.run_job(["work"], deadline_s=60)
    with pytest.raises(LeaseLost, match="ran out inside the window"):
        window.close()
    assert window.record.outcome == "restored" and window.record.lease_lost and "job" not in world.log


def test_the_next_borrower_s_window_is_not_broken_by_a_late_client():
    world = World()
    window = window_on(world)
    window.open()
    world.advance(700)
    world.timer = ("taugate window w2 bob@lab", world.now + 600, 600)
    world.active = "inactive"
    started = world.log.count("start")
    with pytest.raises(LeaseLost, match="bob@lab"):
        window.close()
    assert world.log.count("start") == started and world.armed


def test_a_stop_that_never_ends_is_given_up():
    world = World()
    window = window_on(world, stop_timeout_s=1.0)
    error = use(world, window)
    assert isinstance(error, DeadlineError) and "the stop of sglang-fake.service on fake" in str(error)
    assert window.record.outcome == "restored" and world.serving and not world.armed


def test_a_server_that_comes_back_with_less_memory_is_noted(monkeypatch):
    world = World()
    window = window_on(
        world, lambda event: monkeypatch.setattr(fakehost, "LOADED_MIB", 40004) if event.phase is Phase.HELD else None
    )
    assert use(world, window) is None
    assert window.record.notes == ["GPU-a held 47004 MiB before and holds 40004 MiB now"]


@pytest.mark.parametrize("on_busy", ["stop", "give up"])
def test_a_busy_server_is_drained_then_stopped_or_left_alone_and_the_record_says_so(on_busy):
    world = World()
    world.requests = 2
    window = window_on(world, drain_s=5.0, on_busy=on_busy)
    error = use(world, window)
    assert window.record.outcome == "restored" and world.serving and not world.armed
    if on_busy == "stop":
        assert error is None and window.record.notes == ["drain: 2 requests are left to the stop"]
    else:
        assert isinstance(error, WindowError) and "still had 2 requests after 5 s" in str(error)
        assert world.log == ["arm", "disarm"] and window.record.downtime_s is None


def test_every_field_that_is_different_after_the_restore_is_told():
    world = World()
    window = window_on(world, lambda event: setattr(world, "sizes", 7) if event.phase is Phase.HELD else None)
    assert use(world, window) is None
    assert window.record.fingerprint["differ"] == ["server_info.max_total_num_tokens was 9 and is 7"]
    assert window.record.fingerprint["fields"] >= 8


@pytest.mark.parametrize("field", ["tokenizer_path", "architectures"])
def test_another_field_of_model_info_makes_it_another_server(field):
    world = World()
    window = window_on(world, lambda event: world.info.update({field: "/x"}) if event.phase is Phase.HELD else None)
    error = use(world, window)
    assert isinstance(error, WindowError) and f"model_info.{field} was " in str(error) and "stays armed" in str(error)
    assert window.record.outcome == "broken" and world.quarantine


def test_the_proof_is_several_different_requests():
    world = World()
    assert use(world, window_on(world, verify_requests=3)) is None
    assert world.prompts == [[1, 2, 3], [1, 2, 3], [2, 3, 1], [3, 1, 2]], "the canary, then three after the restore"


def test_a_failed_restore_is_told_by_command_and_address_and_is_never_hidden(tmp_path):
    heard = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/ok" else 500)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{web.server_port}"

        def broken(command, path):
            world = World()
            options = {"notify": command, "webhook": f"{address}/{path}"}
            fail = lambda event: setattr(world, "starts_fail", True) if event.phase is Phase.HELD else None  # noqa: E731
            window = window_on(world, fail, **options)
            error = use(world, window)
            assert isinstance(error, WindowError) and "failed again after it was started" in str(error)
            return str(error), window.record.notes

        tell = ("sh", "-c", f'echo "$0" >{tmp_path}/told; cat >{tmp_path}/json')
        text, notes = broken(tell, "ok")
        assert notes == [] and (tmp_path / "told").read_text().strip() == text
        assert json.loads((tmp_path / "json").read_text()) == heard[0]
        assert heard[0] == {"text": text, "event": "restore failed", "host": "fake", "service": SERVICE, "window": "w1"}
        _, notes = broken(("/no/such/command",), "bad")
        assert "/no/such/command of window.notify could not tell anybody" in notes[0]
        assert "window.webhook could not be told: HTTP Error 500" in notes[1]
        _, notes = broken(("false",), "ok")
        assert notes == ["the command false of window.notify ended with status 1"]
        web.shutdown()


def test_a_window_needs_a_canary():
    with pytest.raises(WindowError, match="canary_input_ids"):
        window_on(World(), canary_input_ids=()).open()


def test_a_server_that_is_down_is_not_stopped():
    world = World()
    world.active = "inactive"
    window = window_on(world)
    with pytest.raises(HostError, match="is not listening"):
        window.open()
    assert world.log == [] and FakeTransport(world).name == "fake"
