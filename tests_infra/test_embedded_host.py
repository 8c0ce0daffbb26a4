"""The embedded host must behave like the host it stands for, since every window test relies on it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from fixtures.embedded import processes
from fixtures.embedded.launch import EmbeddedHost
from taugate.errors import HostError
from taugate.polling import poll

SERVICE = "sglang-tiny.service"
RESTORE = f"systemctl stop 'taugate-job-*.service'; systemctl reset-failed {SERVICE}; "
RESTORE += f"exec systemctl start {SERVICE}"
LEASE = [
    "systemd-run",
    "--quiet",
    "--collect",
    "--unit=taugate-window",
    "--on-active=1s",
    "--description=owner",
]
LEASE += ["--timer-property=AccuracySec=100ms", "--property=Type=oneshot", "--property=Restart=on-failure"]
LEASE += ["--property=RestartSec=5s", "/bin/sh", "-c", RESTORE]
JOB = ["--quiet", "--collect", "--wait", "--pipe", f"--property=Conflicts={SERVICE}"]
JOB += [f"--property=After={SERVICE}"]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedHost]:
    with EmbeddedHost(tmp_path_factory.mktemp("stub"), engine="stub") as host:
        yield host


@pytest.fixture
def host(stub: EmbeddedHost) -> EmbeddedHost:
    """The shared host with its server up and nothing else on it."""
    stub.systemctl("stop", "taugate-window.timer")
    stub.systemctl("reset-failed", SERVICE)
    assert stub.systemctl("start", SERVICE).returncode == 0
    stub.wait_ready(10)
    return stub


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedHost, list[int]]]:
    """A host that serves a real model, and the statuses of /ready in the order of their first appearance."""
    folder = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-m", "fixtures.embedded.tiny", str(folder / "pair")]
    subprocess.run(command, check=True, capture_output=True)
    seen: list[int] = []
    with EmbeddedHost(folder / "host", folder / "pair", dtype="float32") as host:

        def ready() -> bool:
            status = host.request("/ready")[0]
            seen.extend([status] if status not in seen else [])
            if status == 503:
                assert host.request("/v1/models")[0] == 200
            return status == 200

        poll(ready, deadline=90, what="readiness of the tiny model", interval=0.02)
        yield host, seen


def connect(host: EmbeddedHost) -> paramiko.SSHClient:
    info = host.info
    client = paramiko.SSHClient()
    client.load_host_keys(info.known_hosts)
    options = {"timeout": 10, "allow_agent": False, "look_for_keys": False}
    client.connect(info.address, info.port, info.user, key_filename=info.key, **options)
    return client


def run(client: paramiko.SSHClient, command: str, data: bytes = b"") -> tuple[int, str, str]:
    stdin, stdout, stderr = client.exec_command(command)
    stdin.write(data)
    stdin.channel.shutdown_write()
    out, err = stdout.read().decode(), stderr.read().decode()
    return stdout.channel.recv_exit_status(), out, err


def job(host: EmbeddedHost, name: str, *command: str, options: tuple[str, ...] = (), **run_options: object):
    program = str(Path(host.info.dir) / "bin" / "systemd-run")
    argv = [program, *JOB, f"--unit=taugate-job-{name}", *options, *command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, **run_options)


def state(host: EmbeddedHost, unit: str = SERVICE) -> str:
    return host.show(unit)["ActiveState"]


def wait_for_state(host: EmbeddedHost, wanted: str, unit: str = SERVICE, deadline: float = 10) -> None:
    poll(lambda: state(host, unit) == wanted, deadline=deadline, what=f"{unit} {wanted}", interval=0.05)


def processes_of(directory: Path) -> list[int]:
    """Live processes that have the host's directory in their arguments or environment."""
    mark, found = str(directory).encode(), []
    for pid in processes.all_pids():
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if mark in text and processes.live(pid):
            found.append(pid)
    return found


# ---- SSH


def test_ssh_passes_input_both_outputs_and_exit_code(host: EmbeddedHost) -> None:
    with connect(host) as client:
        assert run(client, "cat; echo err >&2; exit 3", b"data\n") == (3, "data\n", "err\n")
        assert run(client, "echo $HOME $TMPDIR")[1].split() == [
            f"{host.info.dir}/home",
            f"{host.info.dir}/tmp",
        ]
        assert run(client, "kill -9 $$")[0] == -1
        code, out, err = run(client, "head -c 3000000 /dev/zero; head -c 1000000 /dev/zero >&2")
        assert (code, len(out), len(err)) == (0, 3_000_000, 1_000_000)


def test_ssh_lets_in_only_its_own_key(host: EmbeddedHost) -> None:
    stranger = paramiko.Ed25519Key.from_private_key(io.StringIO(_new_key()))
    with pytest.raises(paramiko.AuthenticationException), paramiko.SSHClient() as client:
        client.load_host_keys(host.info.known_hosts)
        client.connect(
            host.info.address,
            host.info.port,
            host.info.user,
            pkey=stranger,
            allow_agent=False,
            look_for_keys=False,
        )


def _new_key() -> str:
    import asyncssh

    return asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()


def test_sftp_and_the_one_forwarded_port(host: EmbeddedHost) -> None:
    with connect(host) as client:
        sftp = client.open_sftp()
        sftp.putfo(io.BytesIO(b"payload"), f"{host.info.work_dir}/a.part")
        sftp.posix_rename(f"{host.info.work_dir}/a.part", f"{host.info.work_dir}/a")
        assert Path(host.info.work_dir, "a").read_bytes() == b"payload"
        transport = client.get_transport()
        channel = transport.open_channel(
            "direct-tcpip", ("127.0.0.1", host.info.serve_port), ("127.0.0.1", 0)
        )
        channel.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b"tiny-qwen3.5" in channel.makefile().read()
        with pytest.raises(paramiko.ChannelException, match="prohibited"):
            transport.open_channel("direct-tcpip", ("127.0.0.1", host.info.port), ("127.0.0.1", 0))
        host.systemctl("stop", SERVICE)
        with pytest.raises(paramiko.ChannelException) as refused:
            transport.open_channel("direct-tcpip", ("127.0.0.1", host.info.serve_port), ("127.0.0.1", 0))
        assert refused.value.code == 2


# ---- systemctl


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (f"is-active {SERVICE}", 0),
        ("is-active nosuch.service", 3),
        (f"is-enabled {SERVICE}", 0),
        ("stop nosuch.service", 5),
        ("stop --no-block nosuch.service", 5),
        ("start nosuch.service", 5),
        ("restart nosuch.timer", 5),
        ("stop nosuch-*.service", 0),
        ("show nosuch.service", 0),
        ("kill --signal=SIGKILL nosuch.service", 1),
        ("reset-failed nosuch.service", 1),
        ("list-units --all --plain --no-legend nosuch-*.service", 0),
        ("frobnicate", 1),
    ],
)
def test_exit_codes(host: EmbeddedHost, command: str, code: int) -> None:
    assert host.systemctl(*command.split()).returncode == code


def test_show_and_version(host: EmbeddedHost) -> None:
    assert host.systemctl("is-active", SERVICE).stdout == "active\n"
    assert host.systemctl("is-active", "--quiet", SERVICE).stdout == ""
    assert host.systemctl("--version").stdout.startswith("systemd 252 ")
    asked = host.systemctl(
        "show", "-p", "MainPID,LoadState", "-p", "TimeoutStopUSec", SERVICE
    ).stdout.splitlines()
    assert {line.split("=")[0] for line in asked} == {"MainPID", "LoadState", "TimeoutStopUSec"}
    assert "TimeoutStopUSec=1min 30s" in asked
    unknown = host.show("nosuch.service")
    assert (unknown["LoadState"], unknown["ActiveState"], unknown["MainPID"]) == (
        "not-found",
        "inactive",
        "0",
    )
    known = host.show()
    assert (known["KillMode"], known["Restart"], known["UnitFileState"]) == ("mixed", "always", "enabled")


def test_control_group_lists_the_processes_of_the_unit(host: EmbeddedHost) -> None:
    show = host.show()
    procs = Path(host.info.cgroup_root + show["ControlGroup"]) / "cgroup.procs"
    pids = [int(line) for line in procs.read_text().split()]
    assert int(show["MainPID"]) in pids and len(pids) == 2
    assert host.systemctl("stop", SERVICE).returncode == 0
    assert not procs.parent.exists() and host.show()["ControlGroup"] == ""


def test_a_killed_server_comes_back_and_a_stopped_one_does_not(host: EmbeddedHost) -> None:
    before = host.show()
    os.kill(int(before["MainPID"]), signal.SIGKILL)
    poll(
        lambda: host.show()["MainPID"] not in ("0", before["MainPID"]),
        deadline=10,
        what="restart",
        interval=0.05,
    )
    after = host.show()
    assert int(after["NRestarts"]) == int(before["NRestarts"]) + 1
    assert after["InvocationID"] != before["InvocationID"]
    host.systemctl("stop", SERVICE)
    time.sleep(0.8)  # longer than RestartSec: nothing may happen in it
    assert state(host) == "inactive"


def test_start_during_a_stop_cancels_the_stopping_client(host: EmbeddedHost) -> None:
    deaf = ("/bin/sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done")
    host.command("systemd-run", "--quiet", "--collect", "--unit=slow", "--property=TimeoutStopSec=1", *deaf)
    poll(lambda: "deaf" in host.log("slow.service"), deadline=5, what="the trap", interval=0.02)
    argv = [f"{host.info.dir}/bin/systemctl", "stop", "slow.service"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as stop:
        wait_for_state(host, "deactivating", "slow.service")
        assert host.systemctl("start", "slow.service").returncode == 0
        assert stop.wait(10) == 1 and b"canceled" in stop.stderr.read()
    assert state(host, "slow.service") == "active"
    assert host.systemctl("stop", "slow.service").returncode == 0  # also when SIGKILL had to end it
    assert host.show("slow.service")["LoadState"] == "not-found"


# ---- GPU memory


def test_memory_belongs_to_live_processes(host: EmbeddedHost) -> None:
    assert host.used_mib() == [47004, 47004]
    query = ("--query-compute-apps=pid,gpu_uuid,used_memory,process_name", "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in host.command("nvidia-smi", *query).stdout.splitlines()]
    assert [(row[2], row[3]) for row in rows] == [("47000", "sglang::schedul")] * 2
    holder = rows[0][0]
    assert holder in host.command("fuser", "-v", "/dev/nvidia0").stdout.split()
    with host.hold_memory(1000, gpu=1) as foreign:
        assert host.used_mib() == [47004, 48004]
        assert str(foreign) in host.command("fuser", "/dev/nvidia*").stdout
    host.systemctl("stop", SERVICE)
    assert host.used_mib() == [4, 4]
    assert host.command("nvidia-smi", *query).stdout == ""
    assert host.command("fuser", "/dev/nvidia0", "/dev/nvidia1").returncode == 1


def test_a_server_without_memory_does_not_stay_up(host: EmbeddedHost) -> None:
    host.systemctl("stop", SERVICE)
    with host.hold_memory(20000):
        host.systemctl("start", SERVICE)
        wait_for_state(host, "failed", deadline=20)
        assert host.show()["Result"] == "start-limit-hit"
        assert "OutOfMemoryError" in host.log()
        assert host.systemctl("start", SERVICE).returncode == 1
    host.systemctl("reset-failed", SERVICE)
    assert host.systemctl("start", SERVICE).returncode == 0


# ---- jobs and timers


def test_a_job_passes_input_outputs_and_exit_code(host: EmbeddedHost) -> None:
    command = ("/bin/sh", "-c", "cat; echo $WORD >&2; pwd; exit 7")
    options = (f"--property=WorkingDirectory={host.info.work_dir}", "--setenv=WORD=err")
    done = job(host, "a", *command, options=options, input="data\n")
    assert (done.returncode, done.stdout, done.stderr) == (7, f"data\n{host.info.work_dir}\n", "err\n")
    assert state(host) == "inactive" and host.used_mib() == [4, 4]
    assert job(host, "a", "true").returncode == 0  # the name is free again
    assert job(host, "a", "/bin/sh", "-c", "kill -9 $$$$").returncode == 255  # systemd makes it $$
    words = job(host, "a", "/bin/echo", "$W", "x${W}", "x$W", "$$W", options=("--setenv=W=a b",))
    assert words.stdout == "a b xa b x$W $W\n"
    assert job(host, "a", "nosuch-program").returncode == 1


def test_a_job_and_the_server_exclude_each_other(host: EmbeddedHost) -> None:
    argv = [f"{host.info.dir}/bin/systemd-run", *JOB, "--unit=taugate-job-b", "sleep", "60"]
    with subprocess.Popen(argv) as client:
        wait_for_state(host, "active", "taugate-job-b.service")
        assert state(host) == "inactive"
        listed = host.systemctl(
            "list-units", "--all", "--plain", "--no-legend", "taugate-job-*.service"
        ).stdout
        assert listed.split()[:4] == ["taugate-job-b.service", "loaded", "active", "running"]
        again = host.command("systemd-run", "--unit=taugate-job-b", "true")
        assert again.returncode == 1 and "already loaded" in again.stderr
        assert host.systemctl("start", SERVICE).returncode == 0  # the operator wins
        assert client.wait(10) == 0  # systemd counts an end by SIGTERM as success
    assert host.show("taugate-job-b.service")["LoadState"] == "not-found" and state(host) == "active"


def test_runtime_max_ends_a_job(host: EmbeddedHost) -> None:
    began = time.monotonic()
    assert job(host, "c", "sleep", "60", options=("--property=RuntimeMaxSec=0.5",)).returncode == 1
    assert 0.4 < time.monotonic() - began < 5


def test_the_lease_restores_the_server_when_it_fires(host: EmbeddedHost) -> None:
    assert host.command(*LEASE).returncode == 0
    assert host.show("taugate-window.timer")["SubState"] == "waiting"
    assert host.show("taugate-window.timer")["Description"] == "owner"
    second = host.command(*LEASE)
    assert second.returncode == 1 and "already loaded" in second.stderr
    argv = [f"{host.info.dir}/bin/systemd-run", *JOB, "--unit=taugate-job-d", "sleep", "60"]
    with subprocess.Popen(argv) as client:
        wait_for_state(host, "inactive")
        began = time.monotonic()
        wait_for_state(host, "active")
        assert time.monotonic() - began < 5
        assert client.wait(10) == 0
    poll(
        lambda: host.systemctl("stop", "taugate-window.timer").returncode == 5,
        deadline=5,
        what="end of the lease",
    )


def test_the_lease_is_renewed_and_disarmed(host: EmbeddedHost) -> None:
    assert host.command(*LEASE).returncode == 0
    host.systemctl("stop", SERVICE)
    for _ in range(3):
        time.sleep(0.6)
        assert host.systemctl("restart", "taugate-window.timer").returncode == 0
    assert state(host) == "inactive"  # 1.8 s after a lease of 1 s
    assert host.systemctl("stop", "taugate-window.timer").returncode == 0
    for verb in ("restart", "stop"):
        assert host.systemctl(verb, "taugate-window.timer").returncode == 5
    assert host.show("taugate-window.service")["LoadState"] == "not-found"


# ---- the end of the host


def launcher(directory: Path) -> str:
    """A program that starts a host with jobs on it, prints the host's pid and waits to be killed."""
    return textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from fixtures.embedded.launch import EmbeddedHost
        host = EmbeddedHost(Path({str(directory)!r}), engine="stub", faults=["memory-stays"])
        host.start()
        host.command("systemd-run", "--unit=job", "/bin/sh", "-c", "setsid sleep 600 & sleep 600 & wait")
        print(host.info.pid, flush=True)
        time.sleep(600)
    """)


@pytest.mark.parametrize("victim", ["launcher", "guard", "host"])
def test_nothing_survives_a_sigkill(tmp_path: Path, victim: str) -> None:
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", launcher(tmp_path / "d")], cwd=root, stdout=subprocess.PIPE
    ) as first:
        guard = int(first.stdout.readline())
        host = next(pid for pid in processes.descendants(guard) if processes.stat(pid)[1] == guard)
        poll(
            lambda: len(processes_of(tmp_path / "d")) >= 7,
            deadline=10,
            what="the host's processes",
            interval=0.05,
        )
        os.kill({"launcher": first.pid, "guard": guard, "host": host}[victim], signal.SIGKILL)
        everything = lambda: [pid for pid in processes_of(tmp_path / "d") if pid != first.pid]  # noqa: E731
        poll(
            lambda: not everything(), deadline=5, what=f"end of everything after the {victim}", interval=0.05
        )
        first.kill()


def test_stop_ends_everything_and_a_bad_pair_is_one_sentence(tmp_path: Path) -> None:
    with EmbeddedHost(tmp_path / "d", engine="stub"):
        with pytest.raises(HostError, match="another embedded host is running"):
            EmbeddedHost(tmp_path / "d", engine="stub").start()
        assert processes_of(tmp_path / "d")
    assert not processes_of(tmp_path / "d")
    with pytest.raises(HostError, match="no target/config.json"):
        EmbeddedHost(tmp_path / "e", tmp_path).start()


# ---- faults


def test_fault_memory_stays(tmp_path: Path) -> None:
    with EmbeddedHost(tmp_path, engine="stub", faults=["memory-stays"]) as host:
        host.wait_ready(10)
        assert host.systemctl("stop", SERVICE).returncode == 0
        show = host.show()
        assert (show["ActiveState"], show["KillMode"], show["MainPID"]) == ("inactive", "process", "0")
        assert host.used_mib() == [47004, 47004]
        procs = Path(host.info.cgroup_root + show["ControlGroup"]) / "cgroup.procs"
        assert len(procs.read_text().split()) == 1
        assert host.systemctl("kill", "--signal=SIGKILL", SERVICE).returncode == 0
        poll(lambda: host.used_mib() == [4, 4], deadline=5, what="free memory", interval=0.05)
        assert host.systemctl("start", SERVICE).returncode == 0
        host.wait_ready(10)


def test_fault_slow_start(tmp_path: Path) -> None:
    with EmbeddedHost(tmp_path, engine="stub", faults=["slow-start=1.5"]) as host:
        began = time.monotonic()
        assert state(host) == "active" and host.request("/health") == (0, None)
        host.wait_ready(10)
        assert time.monotonic() - began > 1.0


# ---- the server


def test_the_server_warms_up_like_sglang(served: tuple[EmbeddedHost, list[int]]) -> None:
    assert served[1] == [0, 503, 200]  # refused, warming up, ready


def test_what_the_server_says_about_itself(served: tuple[EmbeddedHost, list[int]]) -> None:
    host = served[0]
    assert host.request("/v1/models")[1]["data"][0]["id"] == "tiny-qwen3.5"
    for name in ("model_info", "get_model_info"):
        assert host.request(f"/{name}")[1]["model_path"] == host.info.model_path
    server = host.request("/server_info")[1]
    assert server == host.request("/get_server_info")[1]
    assert host.info.model_path in server["launch_command"] and server["kernel_path"] == "torch"
    assert host.request("/v1/loads")[1]["loads"][0]["num_running_reqs"] == 0
    assert host.request("/nosuch")[0] == 404


def generate(host: EmbeddedHost, ids: list[int], limit: int, **more: object) -> dict:
    params = {"temperature": 0, "max_new_tokens": limit, **more}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    status, answer = host.request("/generate", body)
    assert status == 200, answer
    return answer


def test_generation_has_the_shape_of_sglang(served: tuple[EmbeddedHost, list[int]]) -> None:
    host, prompt = served[0], list(b"def add(a, b):")
    answer = generate(host, prompt, 8)
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert len(ids) == 8 and meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(prompt), 8, 0)
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[i, None] for i in ids]
    assert [step[0][1] for step in meta["output_top_logprobs"]] == ids and len(
        meta["output_top_logprobs"][0]
    ) == 2
    stopped = generate(host, prompt, 8, stop_token_ids=[ids[2]])
    cut = ids.index(ids[2]) + 1
    assert stopped["output_ids"] == ids[:cut]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[2]}
    text = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "model": "WRONG"}
    completion = host.request("/v1/completions", text)[1]
    assert completion["choices"][0]["text"] == answer["text"] and completion["model"] == "WRONG"


def test_the_cache_changes_nothing(served: tuple[EmbeddedHost, list[int]]) -> None:
    """Greedy with a cache equals asking again for one token after every token."""
    host, ids = served[0], list(b"x = [i for i in")
    expected = generate(host, ids, 12)["output_ids"]
    for token in expected:
        assert generate(host, ids, 1)["output_ids"] == [token]
        ids.append(token)


def test_what_the_server_refuses(served: tuple[EmbeddedHost, list[int]]) -> None:
    host = served[0]
    params = {"temperature": 0, "max_new_tokens": 4}
    for body in (
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}},  # would be sampled
        {"input_ids": [], "sampling_params": params},
        {"input_ids": [[1, 2]], "sampling_params": params},
        {"input_ids": [1], "sampling_params": {**params, "max_new_tokens": 10**6}},
        {"sampling_params": params},
    ):
        status, answer = host.request("/generate", body)
        assert status == 400 and answer["error"]["message"]


def test_a_stop_lets_the_running_request_end(served: tuple[EmbeddedHost, list[int]]) -> None:
    """The last test with the model: the server is down after it."""
    host, answers = served[0], []
    request = threading.Thread(target=lambda: answers.append(generate(host, [1, 2, 3], 400)))
    request.start()
    running = lambda: host.request("/v1/loads")[1]["loads"][0]["num_running_reqs"]  # noqa: E731
    poll(running, deadline=5, what="a running request", interval=0.02)
    host.systemctl("stop", "--no-block", SERVICE)
    poll(lambda: host.request("/ready")[0] == 503, deadline=5, what="draining", interval=0.02)
    assert host.request("/v1/models")[0] == 200 and state(host) == "deactivating"
    request.join(60)
    assert len(answers[0]["output_ids"]) == 400
    wait_for_state(host, "inactive")
    assert host.show()["Result"] == "success" and host.used_mib() == [4, 4]


def test_host_json_is_what_was_printed(stub: EmbeddedHost) -> None:
    assert json.loads(Path(stub.info.dir, "host.json").read_text()) == vars(stub.info)
