"""Whatever is wrong before the window costs one clear sentence, and the server is never stopped."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import metadata

import pytest

from taugate.errors import CheckpointError, HostError, HostKeyError, KernelPathError, PreflightError, StoreError
from tests_infra.gatehost import ROOT, acquired, configured, run_gate, stub_host


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    with stub_host(tmp_path_factory.mktemp("host")) as host:
        yield host


@pytest.fixture
def untouched(embedded):
    """The service has the same start at the end of the test as at its beginning."""
    before = embedded.show()
    yield
    after = embedded.show()
    assert after["ActiveState"] == "active"
    assert (after["InvocationID"], after["MainPID"]) == (before["InvocationID"], before["MainPID"])


def installed(package):
    """Whether the host's Python, which is this one, has the package; imports may be hidden by another test."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def refused(embedded, tmp_path, *settings, error):
    """The sentence with which the gate refuses this configuration."""
    with pytest.raises(error) as caught:
        acquired(configured(tmp_path / "store", *settings), embedded.info)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.usefixtures("untouched")
class TestOneSentenceEach:
    def test_unknown_host_key(self, embedded, tmp_path):
        empty = tmp_path / "known_hosts"
        empty.write_text("")
        sentence = refused(embedded, tmp_path, f"host.known_hosts={empty}", error=HostKeyError)
        assert "ssh-keyscan" in sentence and str(empty) in sentence

    def test_changed_host_key(self, embedded, tmp_path):
        key = tmp_path / "other"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        kind, public = key.with_suffix(".pub").read_text().split()[:2]
        known = tmp_path / "known_hosts"
        known.write_text(f"[{embedded.info.address}]:{embedded.info.port} {kind} {public}\n")
        assert "key" in refused(embedded, tmp_path, f"host.known_hosts={known}", error=HostKeyError)

    def test_wrong_ssh_port(self, embedded, tmp_path):
        sentence = refused(embedded, tmp_path, "host.ssh_port=1", error=HostError)
        assert "port 1" in sentence or ":1" in sentence

    def test_wrong_serving_port(self, embedded, tmp_path):
        sentence = refused(embedded, tmp_path, "host.port=9", error=HostError)
        assert "9" in sentence

    def test_unit_not_found(self, embedded, tmp_path):
        sentence = refused(embedded, tmp_path, "host.service=nothing.service", error=HostError)
        assert "nothing.service is not-found" in sentence and "`service`" in sentence

    def test_model_id_differs(self, embedded, tmp_path):
        sentence = refused(embedded, tmp_path, "host.model_id=Qwen3.6-27B", error=HostError)
        assert "'tiny-qwen3.5'" in sentence and "'Qwen3.6-27B'" in sentence

    def test_target_path_differs(self, embedded, tmp_path):
        assert "/elsewhere" in refused(embedded, tmp_path, "target.path=/elsewhere", error=HostError)

    def test_remote_python_without_torch(self, embedded, tmp_path):
        bare = tmp_path / "bare"
        subprocess.run([embedded.info.remote_python, "-m", "venv", "--without-pip", str(bare)], check=True)
        sentence = refused(embedded, tmp_path, f"host.remote_python={bare}/bin/python", error=HostError)
        assert "lacks torch, transformers, safetensors" in sentence and "`remote_python`" in sentence

    @pytest.fixture
    def torch_for_cpus(self):
        import torch

        if torch.version.cuda:
            pytest.skip("the torch of the embedded host can use GPUs")

    @pytest.mark.usefixtures("torch_for_cpus")
    def test_a_device_that_torch_there_cannot_use(self, embedded, tmp_path):
        sentence = refused(embedded, tmp_path, "capture.device=cuda", error=HostError)
        assert 'capture.device is "cuda", but the torch of' in sentence and "is built for CPUs" in sentence

    @pytest.mark.usefixtures("torch_for_cpus")
    def test_kernels_that_are_not_there_or_have_no_gpu(self, embedded, tmp_path):
        """No server is stopped to find out. Asked twice: the check of the checkpoint, the first time, hides fla."""
        for _ in range(2):
            if installed("flash-linear-attention"):
                sentence = refused(embedded, tmp_path, "capture.kernel_path=fla", error=KernelPathError)
                assert 'kernel_path "fla" needs a GPU' in sentence
            else:
                sentence = refused(embedded, tmp_path, "capture.kernel_path=fla", error=HostError)
                assert "has no fla; install flash-linear-attention there" in sentence
        if not installed("flash-qla"):
            sentence = refused(embedded, tmp_path, "capture.kernel_path=flash_qla", error=HostError)
            assert "has no flash_qla; install flash_qla there" in sentence

    def test_remote_python_that_is_not_there(self, embedded, tmp_path):
        sentence = refused(embedded, tmp_path, "host.remote_python=/no/python", error=HostError)
        assert "/no/python" in sentence

    def test_drafter_that_is_not_there(self, embedded, tmp_path):
        sentence = refused(embedded, tmp_path, f"drafters.candidate={tmp_path}/gone", error=CheckpointError)
        assert f"{tmp_path}/gone does not exist" in sentence

    def test_drafter_with_damaged_weights(self, embedded, tmp_path):
        """Known before the host is contacted, not after its server was stopped."""
        cut = tmp_path / "cut"
        shutil.copytree(ROOT / "fixtures/embedded/pair/drafters/candidate", cut)
        weights = cut / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        sentence = refused(embedded, tmp_path, f"drafters.candidate={cut}", error=CheckpointError)
        assert str(weights) in sentence and "copy" in sentence

    def test_drafter_of_another_target(self, embedded, tmp_path):
        import torch
        from safetensors.torch import save_file

        from taugate.drafter.checkpoint import expected_shapes, read_config

        raw = json.loads((ROOT / "fixtures/embedded/pair/drafters/candidate/config.json").read_text())
        for changed, said in (
            ({"num_target_layers": 64}, "64 layers of width 256 does not fit target target with 8 layers"),
            ({"vocab_size": 9}, "a vocabulary of 9 does not fit target target, which has 4096"),
            ({"dflash_config": {**raw["dflash_config"], "target_layer_ids": [0, 7]}}, "taps the last layer 7"),
        ):
            other = tmp_path / str(len(said))
            other.mkdir()
            (other / "config.json").write_text(json.dumps({**raw, **changed}))
            weights = {name: torch.zeros(shape) for name, shape in expected_shapes(read_config(other)).items()}
            save_file(weights, other / "model.safetensors")
            assert said in refused(embedded, tmp_path, f"drafters.candidate={other}", error=CheckpointError)

    def test_downtime_over_budget(self, embedded, tmp_path):
        sentence = refused(embedded, tmp_path, "host.downtime_budget=10s", error=PreflightError)
        assert "the server was not touched" in sentence and "budget 10 s" in sentence

    def test_missing_states_without_permission_to_open_a_window(self, embedded, tmp_path):
        sentence = r"3 completions are not in .* first is key .*pytest -m gpu_window"
        with pytest.raises(StoreError, match=sentence):
            acquired(configured(tmp_path / "store"), embedded.info, armed=False)


@pytest.mark.usefixtures("untouched")
def test_a_refusal_is_exit_1_and_one_sentence_without_traceback(embedded, tmp_path):
    done = run_gate(embedded, tmp_path / "store", "--set", "host.service=nothing.service")
    assert done.returncode == 1
    assert "nothing.service is not-found" in done.stdout
    assert (
        "Traceback" not in done.stdout
        and ".py:" not in done.stdout.split("short test summary")[0].split("= ERRORS =")[1]
    )


@pytest.mark.usefixtures("untouched")
def test_dry_run_prints_the_plan_and_stops_nothing(embedded, tmp_path):
    done = run_gate(embedded, tmp_path / "store", "--dry-run")
    assert done.returncode == 0, done.stdout
    assert "systemctl stop --no-block sglang-tiny.service" in done.stdout and "s without the server" in done.stdout
    assert "capture 3 sequences" in done.stdout
