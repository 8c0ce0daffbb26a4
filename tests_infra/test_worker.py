"""The capture's job: it resumes, it leaves only complete files, and whatever runs out is one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from taugate.errors import JobError
from taugate.host.transport import Completed
from taugate.target import worker
from taugate.target.progress import LayerDone, SequenceDone
from taugate.target.results import Results, complete_sequences
from tests_infra import checkpoints

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(directory, "qwen3_5")
    return directory


def make_spec(model, count=24, length=40):
    sequences = [{"key": f"key{n:02}", "token_ids": [(7 * n + i) % 64 for i in range(length)]} for n in range(count)]
    return {"model_path": str(model), "kernel_path": "torch", "dtype": "float32", "device": "cpu", "taps": [0, 2],
            "sequences": sequences, "threads": 1}  # fmt: skip


def hashes(out):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("*.safetensors")}


def command(spec, out, *shell):
    (out.parent / "spec.json").write_text(json.dumps(spec))
    argv = [sys.executable, "-m", "taugate.target.capture", "--spec", str(out.parent / "spec.json"), "--out", str(out)]
    return [*shell, *argv]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The spec of a capture, the directory of a run that nothing interrupted, and its events."""
    out, spec = tmp_path_factory.mktemp("whole"), make_spec(model)
    return spec, out, list(worker.run(spec, out))


def test_events_tell_what_a_progress_bar_needs(whole):
    spec, out, events = whole
    states = [event for event in events if event["event"] == "state"]
    assert [event["done"] for event in states] == list(range(1, 25))
    assert all(event["of"] == 24 and event["tokens"] == 40 and event["left_s"] >= 0 for event in states)
    assert states[-1]["bytes"] == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    done = events[-1]
    assert done["event"] == "done" and done["tokens"] == 24 * 40 and done["seconds"] > 0
    assert {key: record["sha256"] for key, record in done["files"].items()} == {
        name.removesuffix(".safetensors"): digest for name, digest in hashes(out).items()
    }
    kernels = done["files"]["key00"]["kernels"]
    assert kernels["path"] == "torch", "each result carries the evidence of what computed it"


def test_a_second_run_computes_nothing(whole, monkeypatch):
    spec, out, _ = whole
    monkeypatch.setattr(worker.Capture, "from_spec", lambda *_: pytest.fail("the model was loaded again"))
    events = list(worker.run(spec, out))
    assert [event["event"] for event in events] == ["loading", "done"] and events[-1]["tokens"] == 0


def test_kill_9_half_way_and_the_next_run_does_the_rest_with_the_same_bytes(whole, tmp_path):
    spec, out, _ = whole
    mine = tmp_path / "out"
    with subprocess.Popen(command(spec, mine), stdout=subprocess.PIPE, text=True, env=ENV) as job:
        for line in job.stdout:
            if json.loads(line).get("done") == 7:
                os.kill(job.pid, signal.SIGKILL)
                break
    assert job.returncode == -signal.SIGKILL
    (mine / ".tmpAbCdEf").write_bytes(b"half of a file that safetensors was writing")
    kept = complete_sequences(spec, mine)
    assert 7 <= len(kept) < 24
    before = {path: path.stat().st_mtime_ns for path in mine.glob("*.safetensors")}
    events = list(worker.run(spec, mine))
    assert len([event for event in events if event["event"] == "state"]) == 24 - len(kept), "only the rest was done"
    assert all(path.stat().st_mtime_ns == then for path, then in before.items() if path.stem in kept)
    assert hashes(mine) == hashes(out), "the states are the same bytes as those of a run that was left alone"
    assert {path.suffix for path in mine.iterdir()} == {".json", ".safetensors"}, "nothing half is left"


@pytest.mark.parametrize("damage", ["no record", "another record", "cut", "other tokens", "other taps"])
def test_what_is_not_complete_is_captured_again(whole, tmp_path, damage):
    spec, out, _ = whole
    (tmp_path / "out").mkdir()
    for path in out.iterdir():
        (tmp_path / "out" / path.name).write_bytes(path.read_bytes())
    if damage == "no record":
        (tmp_path / "out" / "key03.json").unlink()
    elif damage == "another record":
        (tmp_path / "out" / "key03.json").write_text("[]")
    elif damage == "cut":
        file = tmp_path / "out" / "key03.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "other tokens":
        spec = json.loads(json.dumps(spec))
        spec["sequences"][3]["token_ids"][5] = 63
    else:
        spec = spec | {"taps": [0, 3]}
    assert len(complete_sequences(spec, tmp_path / "out")) == (0 if damage == "other taps" else 23)


class Fake:
    """An engine that gives two sequences and then runs into `error`."""

    model_type = "llama"

    def __init__(self, error):
        self.error = error

    def facts(self):
        return {"name": "fake"}

    def states(self, sequences):
        import torch

        yield LayerDone(0, 4, len(sequences), 1000, 1.0)
        for index in (0, 1):
            yield SequenceDone(index, {"tap.0": torch.zeros(40, 8).bfloat16(), "tap.2": torch.zeros(40, 8).bfloat16(),
                                       "final_hidden": torch.zeros(40, 8).bfloat16()})  # fmt: skip
        if isinstance(self.error, BaseException):
            raise self.error
        self.error()


def _gpu():
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …")


def _host():
    import torch

    torch.empty(1 << 60)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_gpu(), r"the GPU has too little memory for the capture \(CUDA out of memory.*capture\.max_gpu_memory"),
        (MemoryError(), "the host has too little memory for the capture"),
        (_host, "the host has too little memory for the capture"),
        (OSError(28, "No space left on device"), "the disk of .* is full: make room there"),
        (ImportError("libx.so: failed to map segment from shared object"), "the host has too little memory"),
        (OSError(122, "Disk quota exceeded"), "the disk of .* is over its quota"),
    ],
)
def test_what_runs_out_is_one_sentence_and_complete_files_stay(model, tmp_path, monkeypatch, error, said):
    spec, fake = make_spec(model), Fake(error)
    monkeypatch.setattr(worker.Capture, "from_spec", lambda *_: fake)
    with pytest.raises(JobError, match=said) as caught:
        list(worker.run(spec, tmp_path / "out"))
    assert "2 of 24 sequences are captured and stay" in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(complete_sequences(spec, tmp_path / "out")) == ["key00", "key01"]


def test_another_error_is_not_taken_for_one_of_these(model, tmp_path, monkeypatch):
    monkeypatch.setattr(worker.Capture, "from_spec", lambda *_: Fake(RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        list(worker.run(make_spec(model), tmp_path / "out"))


def test_a_disk_that_takes_no_more_ends_a_real_job_with_one_sentence(whole, tmp_path):
    """A limit on the size of files, which any user may set: safetensors itself runs into it."""
    spec = make_spec(whole[0]["model_path"], count=3)
    spec["sequences"][1]["token_ids"] = spec["sequences"][1]["token_ids"] * 20
    argv = command(spec, tmp_path / "out", "sh", "-c", 'ulimit -f 64; exec "$@"', "sh")
    done = subprocess.run(argv, capture_output=True, text=True, env=ENV, timeout=120, check=False)
    assert done.returncode == 1
    (sentence,) = (line for line in done.stderr.splitlines() if line)
    assert sentence.startswith(f"the disk of {tmp_path / 'out'} takes no file of this size: make room there; 1 of 3")
    assert json.loads(done.stdout.splitlines()[-1]) == {"event": "error", "sentence": sentence}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["key00.json", "key00.safetensors"]


class TestCommand:
    def test_help_shows_a_usable_command(self):
        argv = [sys.executable, "-m", "taugate.target.capture", "--help"]
        done = subprocess.run(argv, capture_output=True, text=True, env=ENV, timeout=120, check=True)
        assert "python -m taugate.target.capture --model DIR --sequences FILE --taps 1,3,5" in done.stdout

    def test_twice_into_the_store_does_the_work_once(self, model, tmp_path, capsys):
        sequences = tmp_path / "sequences.jsonl"
        lines = [{"token_ids": [1, 2, 3]}, {"prompt_ids": [4, 5], "output_ids": [6]}]
        sequences.write_text("\n".join(map(json.dumps, lines)))
        args = ["--model", str(model), "--sequences", str(sequences), "--taps", "0,2", "--dtype", "float32"]
        args += ["--device", "cpu", "--threads", "1", "--store", str(tmp_path / "store")]
        for captured in (2, 0):
            assert worker.main(args) == 0
            done = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert (done["captured"], done["stored"]) == (captured, 2)
        assert len(list((tmp_path / "store" / "states").rglob("states.safetensors"))) == 2
        assert not list((tmp_path / "store" / "captures").iterdir()), "results were moved, not copied"

    @pytest.mark.parametrize(
        ("line", "said"),
        [("{", "line 1: needs token_ids"), ('{"token_ids": [1.5]}', "line 1: needs"), ("", "holds no sequence")],
    )
    def test_unusable_sequences(self, model, tmp_path, capsys, line, said):
        (tmp_path / "s").write_text(line)
        assert worker.main(["--model", str(model), "--sequences", str(tmp_path / "s")]) == 1
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["--taps", "4"], "taps [4] are outside the target's layers 0…3"),
            (["--no-final-hidden"], "no tap and no final_hidden was asked for"),
            (["--kernel-path", "fla"], 'kernel_path "fla" needs a GPU, and the capture runs on a CPU'),
            (["--device", "cuda"], "torch finds no GPU"),
            (["--max-gpu-memory", "3TB"], "max_gpu_memory is '3TB'; write"),
            (["--max-gpu-memory", "0"], "max_gpu_memory is 0"),
        ],
    )
    def test_what_the_target_or_the_machine_cannot_do_is_known_first(
        self, model, tmp_path, capsys, monkeypatch, args, said
    ):
        """Before the weights are hashed, which takes minutes for a large target, and before anything is written."""
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr("taugate.target.here.read_target", lambda *_: pytest.fail("the weights were hashed"))
        (tmp_path / "s").write_text('{"token_ids": [1, 2]}')
        given = ["--model", str(model), "--sequences", str(tmp_path / "s"), "--store", str(tmp_path / "store"), *args]
        assert worker.main(given) == 1
        told = capsys.readouterr()
        assert said in told.err and told.err.count("\n") == 1
        assert [json.loads(line)["event"] for line in told.out.splitlines()] == ["error"]
        assert not (tmp_path / "store").exists()

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["--engine", "turbo"], "invalid choice: 'turbo'"),
            (["--device", "tpu"], "invalid choice: 'tpu'"),
            (["--threads", "0"], "'0' is no number of at least 1"),
            (["--taps", "a,b"], "'a,b' is no list of layers"),
            (["--taps", "1,,3"], "'1,,3' is no list of layers"),
            ([], "give either --spec and --out, or --model and --sequences"),
        ],
    )
    def test_unusable_options_are_one_sentence(self, capsys, args, said):
        with pytest.raises(SystemExit) as ended:
            worker.main(args)
        told = capsys.readouterr().err
        assert ended.value.code == 2 and said in told and told.count("\n") == 1

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"engine": "turbo"}, "engine is 'turbo', not one of auto, resident, streamed"),
            ({"dtype": "float8"}, "dtype is 'float8', not one of bfloat16, float32"),
            ({"taps": ["1"]}, "taps is not a list of layers"),
            ({"threads": 0}, "threads is 0, not a number of at least 1"),
            ({"sequences": []}, "sequences is not a list of at least one"),
            ({"tapz": [1]}, "tapz is not part of one"),
            ({"sequences": [{"key": "a", "token_ids": []}]}, "sequence 1 has no token_ids"),
            ({"sequences": [{"key": "../a", "token_ids": [1]}]}, "sequence 1 has no key that can be a file's name"),
            ({"sequences": [{"key": "a", "token_ids": [1]}] * 2}, "sequence 2 has the key a of an earlier one"),
            ({"sequences": [{"key": "a", "token_ids": [64]}]}, "sequence 1 holds token 64, but the vocabulary of"),
        ],
    )
    def test_an_unusable_spec(self, model, tmp_path, capsys, change, said):
        (tmp_path / "s").write_text(json.dumps(make_spec(model, count=1) | change))
        assert worker.main(["--spec", str(tmp_path / "s"), "--out", str(tmp_path / "out")]) == 1
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1 and not (tmp_path / "out").exists()

    @pytest.mark.parametrize("text", ["{", "[]", "{}", None])
    def test_a_file_that_is_no_spec(self, tmp_path, capsys, text):
        if text is not None:
            (tmp_path / "s").write_text(text)
        assert worker.main(["--spec", str(tmp_path / "s"), "--out", str(tmp_path)]) == 1
        assert ("is no capture spec" if text else "cannot be read (No such file") in capsys.readouterr().err

    def test_places_that_cannot_be_written(self, model, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        (tmp_path / "s").write_text('{"token_ids": [1, 2]}')
        (tmp_path / "spec").write_text(json.dumps(make_spec(model, count=1)))
        for args in (["--model", str(model), "--sequences", str(tmp_path / "s"), "--device", "cpu", "--store"],
                     ["--spec", str(tmp_path / "spec"), "--out"]):  # fmt: skip
            assert worker.main([*args, str(tmp_path / "file")]) == 1
            said = capsys.readouterr().err
            assert said == f"{tmp_path / 'file'} cannot be used (File exists); correct the path or its permissions\n"

    def test_a_disk_that_is_full_from_the_start(self, model, tmp_path):
        """The memo of hashes is the first that does not fit."""
        (tmp_path / "s").write_text('{"token_ids": [1, 2]}')
        argv = [sys.executable, "-m", "taugate.target.capture", "--model", str(model), "--sequences",
                str(tmp_path / "s"), "--device", "cpu", "--store", str(tmp_path / "store")]  # fmt: skip
        limited = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *argv]
        done = subprocess.run(limited, capture_output=True, text=True, env=ENV, timeout=120, check=False)
        assert done.returncode == 1
        assert done.stderr == f"the disk of {tmp_path / 'store'} takes no file of this size: make room there\n"
        assert not list((tmp_path / "store").iterdir())

    def test_whoever_waits_for_another_process_says_so(self, model, tmp_path):
        from filelock import FileLock

        from taugate.target.here import LOCK, Wanted, capture_into_store

        lock = FileLock(tmp_path / LOCK)
        lock.acquire()
        events = capture_into_store(model, [[1, 2]], Wanted("torch", "float32", "cpu", (1,)), tmp_path)
        said = next(events)
        assert said["event"] == "waiting" and str(tmp_path) in said["sentence"]
        lock.release()
        assert list(events)[-1]["captured"] == 1

    def test_taps_are_not_computed_for_an_entry_that_is_damaged(self, model, tmp_path, monkeypatch):
        from taugate.errors import StoreError
        from taugate.target.here import Wanted, capture_into_store

        list(capture_into_store(model, [[1, 2]], Wanted("torch", "float32", "cpu", (1,)), tmp_path))
        (states,) = tmp_path.glob("states/*/*/*/states.safetensors")
        data = states.read_bytes()
        states.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        monkeypatch.setattr(worker.Capture, "from_spec", lambda *_: pytest.fail("the model was loaded"))
        with pytest.raises(StoreError, match="does not have the content"):
            list(capture_into_store(model, [[1, 2]], Wanted("torch", "float32", "cpu", (1, 2)), tmp_path))


@pytest.mark.parametrize(
    ("rc", "stderr", "said"),
    [(137, "", "it was killed (by the kernel for want of memory"), (1, "Traceback\nboom", "boom"), (3, "", "status 3")],
)
def test_a_job_that_was_killed_says_what_stays(rc, stderr, said):
    from types import SimpleNamespace

    from taugate.pipeline.remote import RemotePackage

    host = SimpleNamespace(name="box", remote_python="python", work_dir="/w")

    def run_job(argv, *, deadline_s, env, on_line):
        on_line('{"event": "state", "done": 5, "of": 9}')
        return Completed(tuple(argv), rc, "", stderr, 1.0, "box")

    package = RemotePackage(host, "/w/taugate.zip")
    with pytest.raises(JobError) as caught:
        package.job(SimpleNamespace(run_job=run_job), "target.capture", deadline_s=1, on_event=lambda event: None)
    assert said in str(caught.value) and "5 of 9 sequences stay there" in str(caught.value)


def test_results_of_two_writers_do_not_mix(tmp_path):
    """A result that is written again replaces the old one whole."""
    import torch

    results, facts = Results(tmp_path), {"kernels": {}, "engine": {}, "device": "cpu"}
    for value in (1.0, 2.0):
        record = results.write("k", [1, 2], {"tap.0": torch.full((2, 4), value).bfloat16()}, facts)
        assert record["sha256"] == hashes(tmp_path)["k.safetensors"]
        assert results.complete("k", [1, 2], ["tap.0"]) == record
    assert results.complete("k", [1, 3], ["tap.0"]) is None and results.complete("k", [1, 2], ["tap.1"]) is None
