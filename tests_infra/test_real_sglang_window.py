"""The window on a host whose unit is the real SGLang 0.5.23 on a CPU. `make contract` installs it.

Four starts of the server, about a minute each on two cores.
"""

from __future__ import annotations

import threading

import pytest

from fixtures.testhost.drive import JOB, Runner, Watch, leftovers, settle, started_after
from fixtures.testhost.host import MODEL
from fixtures.testhost.needed import need_host
from taugate.errors import HostError
from tools.contract.server import real_host

pytestmark = pytest.mark.slow
START_S = 240.0
TTL_S = 20.0
WINDOW = {"ttl_s": TTL_S, "free_timeout_s": 60.0, "start_timeout_s": START_S, "persist_s": 60.0,
          "request_timeout_s": 30.0}  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    need_host()
    try:
        made = real_host(tmp_path_factory.mktemp("real") / "host", memory=True)
    except HostError as error:
        pytest.skip(str(error))
    with made as host:
        host.wait_serving(START_S)
        assert host.serves()
        yield host


def test_a_window_gives_the_real_server_back(host):
    answers = []
    params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    body = {"input_ids": [72, 101], "sampling_params": params}
    request = threading.Thread(target=lambda: answers.append(host.ask("/generate", body, timeout=60)))
    with Watch(host) as watch, Runner(host, "phase:leased", job=JOB, **WINDOW) as runner:
        runner.reach("phase:leased", 60)
        request.start()  # the stop meets a request under way
        runner.go()
        end = runner.end(START_S + 120)
        request.join(60)
    record = end["record"]
    at = [(event["phase"], round(event["seconds"], 1)) for event in record["phases"]]
    print(f"downtime {record['downtime_s']:.1f} s, of that the start {record['start_s']:.1f} s: {at}")
    assert (end["end"], end["error"]) == ("restored", "NoneType"), end
    assert answers[0][0] == 200 and len(answers[0][1]["output_ids"]) == 400
    assert record["escalations"] == [] and record["notes"] == [] and record["lease_lost"] == ""
    assert record["identity_before"] == record["identity_after"]
    assert record["identity_after"]["model_id"] == MODEL and record["identity_after"]["version"] == "0.5.23"
    assert record["canary"]["same"] and record["gpus_before_mib"] == record["gpus_after_mib"]
    assert host.serves() and leftovers(host) == "" and watch.foreign_alive()


def test_a_client_killed_in_mid_window_leaves_the_real_server_to_the_host(host):
    with Watch(host) as watch, Runner(host, "phase:held", job=JOB, **WINDOW) as runner:
        runner.reach("phase:held", 120)
        runner.kill()
        settle(host, START_S)
    began = started_after(host, runner.died_at) - runner.died_at
    print(f"the host began the restore {began:.1f} s after the client's death (TTL {TTL_S:g} s)")
    assert began <= TTL_S + 1 and watch.foreign_alive()
