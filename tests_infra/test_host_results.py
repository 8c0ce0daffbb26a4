"""What a window has captured is not lost: results wait on the host, and no second window is opened for them."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from taugate.errors import CheckpointError, HostError, StoreError
from taugate.host.ssh import SshTransport
from taugate.pipeline.states import _producing
from taugate.polling import poll
from taugate.target.head import HeadStore, read_bundle, write_bundle
from taugate.target.here import LOCK
from taugate.target.store import FINAL_HIDDEN
from tests_infra import checkpoints
from tests_infra.gatehost import acquired, configured, stub_host


def test_a_fetch_that_failed_costs_no_second_window(tmp_path, monkeypatch):
    """One of three states comes over, then the connection fails; the next run fetches the rest beside the server."""
    real, fetched, records = SshTransport.get, [], []

    def failing(self, remote, local, **kwargs):
        if "/captures/" in remote:
            fetched.append(remote)
            if len(fetched) == 2:
                raise HostError("the connection to the host was lost")
        return real(self, remote, local, **kwargs)

    with stub_host(tmp_path / "host") as embedded:
        config = configured(tmp_path / "store", "completions.max_new_tokens=8")
        with monkeypatch.context() as patch, pytest.raises(HostError, match="was lost"):
            patch.setattr(SshTransport, "get", failing)
            acquired(config, embedded.info, record=records.append)
        assert [r["outcome"] for r in records if r["type"] == "window"] == ["restored"]
        assert len(list((tmp_path / "store" / "states").rglob("meta.json"))) == 1, "what came over is in the store"
        before = embedded.show()
        records.clear()
        data = acquired(config, embedded.info, record=records.append)
        assert embedded.show()["InvocationID"] == before["InvocationID"], "the server was not stopped again"
        assert [r["outcome"] for r in records if r["type"] == "window"] == ["not needed"]
        for sequence in data.sequences:
            assert data.states(sequence, [FINAL_HIDDEN])[FINAL_HIDDEN].shape[0] == len(sequence.token_ids)
            (origin,) = data.store.meta(data.key(sequence))["provenance"]
            assert origin["kernels"]["path"] == "torch" and origin["host"]
        assert not list((Path(embedded.info.work_dir) / "captures").iterdir()), "what was fetched is gone from there"
        assert data.head().head.shape[0] == data.target.vocab_size


def test_one_process_produces_and_the_others_wait_and_say_so(tmp_path):
    """FileLock only for producing: who comes second is told, and goes on when the first is done."""
    said, inside = [], threading.Event()
    survey = SimpleNamespace(cache=tmp_path, say=said.append)

    def second():
        with _producing(survey):
            inside.set()

    with FileLock(tmp_path / LOCK):
        other = threading.Thread(target=second)
        other.start()
        poll(lambda: bool(said), deadline=10, what="a word of the second process", interval=0.05)
        assert said == [f"another process captures into {tmp_path}; waiting for its end"] and not inside.is_set()
    other.join(10)
    assert inside.is_set()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, checkpoints.write_checkpoint(directory, "qwen3_5")


class TestHeadBundle:
    def test_it_holds_the_checkpoint_s_own_rows(self, model, tmp_path):
        directory, state = model
        made = write_bundle(directory, tmp_path / "head.safetensors")
        there = load_file(tmp_path / "head.safetensors")
        assert torch.equal(there["embedding"], state["model.embed_tokens.weight"])
        assert torch.equal(there["head"], state["lm_head.weight"])
        assert write_bundle(directory, tmp_path / "again")["sha256"] == made["sha256"], "same weights, same bytes"
        embedding, head = read_bundle(tmp_path / "head.safetensors", "bfloat16")
        assert torch.equal(embedding, there["embedding"]) and torch.equal(head, there["head"])

    def test_it_is_kept_by_content_and_a_damaged_one_is_an_error(self, model, tmp_path):
        heads = HeadStore(tmp_path)
        assert heads.find("w1") is None
        with pytest.raises(StoreError, match="has no head bundle of the target with weights w1"):
            heads.load("w1")
        for weights in ("w1", "w2"):
            heads.produce(model[0], weights)
        assert heads.find("w1") == heads.find("w2"), "two fine-tunings of one head share its file"
        assert len(list((tmp_path / "heads").glob("*.safetensors"))) == 1
        path, data = heads.find("w1"), heads.find("w1").read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(StoreError, match=f"{path} is damaged"):
            heads.load("w1")
        path.write_bytes(data[:-1])
        with pytest.raises(StoreError, match=f"{path} does not have its {len(data)} bytes"):
            heads.load("w1")
        path.unlink()
        with pytest.raises(StoreError, match=f"{path} is missing"):
            heads.find("w1")
        (tmp_path / "heads" / "w1.json").write_text("{")
        with pytest.raises(StoreError, match=r"w1\.json is damaged"):
            heads.find("w1")

    def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(self, model, tmp_path):
        out = tmp_path / "head.safetensors"
        with subprocess.Popen(["true"]) as ended:
            pass
        dead, living = (tmp_path / f".{out.name}.{pid}.partial" for pid in (ended.pid, os.getppid()))
        for partial in (dead, living):
            partial.write_bytes(b"half")
        write_bundle(model[0], out)
        assert sorted(tmp_path.iterdir()) == sorted([out, living])

    def test_a_checkpoint_without_a_head(self, tmp_path):
        checkpoints.write_checkpoint(tmp_path, "llama")
        index = tmp_path / "model.safetensors.index.json"
        for shard in tmp_path.glob("*.safetensors"):
            tensors = load_file(shard)
            tensors.pop("lm_head.weight", None)
            save_file(tensors, shard)
        told = json.loads(index.read_text())
        told["weight_map"].pop("lm_head.weight")
        index.write_text(json.dumps(told))
        with pytest.raises(CheckpointError, match=r"holds no lm_head\.weight, and its config does not tie"):
            write_bundle(tmp_path, tmp_path / "out")
