"""On a GPU, at the exact layer shapes of Qwen3.6-27B: both engines, both kernel paths, ceilings, warm-up.

Random weights, the first layers only, bf16 shards on the RAM disk: TAUGATE_GPU_LAYERS (4) says how many.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = int(os.environ.get("TAUGATE_GPU_LAYERS", "4"))
LENGTHS = (1, 63, 64, 65, 700, 1024, 1100, 2500)
TAPS = [0, LAYERS - 2, LAYERS - 1]


def gpu_seen() -> bool:
    """Whether this machine has an NVIDIA GPU, without importing torch."""
    return shutil.which("nvidia-smi") is not None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.numerics(level="capture on a GPU"),
    pytest.mark.skipif(not gpu_seen(), reason="this machine has no GPU"),
    pytest.mark.filterwarnings("ignore"),  # those of torch and Triton about the machine at hand
]


@pytest.fixture(scope="module")
def checkpoint():
    from benchmarks.shape27b import write_checkpoint

    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="taugate-"))
    write_checkpoint(directory, LAYERS)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def sequences():
    import torch

    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 248320, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def warmed(checkpoint, sequences, tmp_path_factory):
    """What the warm-up did, in a process of its own, twice."""
    spec = tmp_path_factory.mktemp("warm") / "spec.json"
    wanted = {"model_path": str(checkpoint), "kernel_path": "fla", "dtype": "bfloat16", "device": "cuda"}
    spec.write_text(json.dumps({**wanted, "sequences": [{"key": "k", "token_ids": ids} for ids in sequences]}))
    command = [sys.executable, "-m", "taugate.target.warmup", "--spec", str(spec)]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[-1].stderr[-2000:]
    return [json.loads(run.stdout.splitlines()[-1]) for run in runs]


def captured(checkpoint, sequences, engine, path="fla", **options):
    """States by sequence and the capture's facts and evidence."""
    from taugate.target.capture import Capture, SequenceDone
    from taugate.target.kernels import kernel_path

    capture = Capture(str(checkpoint), path, "bfloat16", "cuda", TAPS, engine=engine, **options)
    with kernel_path(path, capture.model_type, "cuda") as ran:
        states = {e.index: e.tensors for e in capture.states(sequences) if isinstance(e, SequenceDone)}
    return states, capture.facts(), ran.require()


@pytest.fixture(scope="module")
def resident(checkpoint, sequences, warmed):
    return captured(checkpoint, sequences, "resident")


@pytest.fixture(scope="module")
def streamed(checkpoint, sequences, warmed):
    return captured(checkpoint, sequences, "streamed")


def assert_equal(some, others):
    import torch

    for index, length in enumerate(LENGTHS):
        assert some[index].keys() == others[index].keys()
        for name, state in some[index].items():
            assert state.shape == (length, 5120)
            assert torch.equal(state, others[index][name]), f"{name} of {length} tokens"


def test_warm_up_compiles_once_and_the_capture_nothing(warmed, resident, streamed):
    assert warmed[1]["compiled"] == 0 and warmed[1]["cached"] > 0
    for _, facts, _ in (resident, streamed):
        assert facts["compilations"]["compiled"] == 0, facts["compilations"]["kernels"]


def test_streamed_equals_resident(resident, streamed, evidence):
    assert_equal(resident[0], streamed[0])
    assert streamed[1]["plan"]["buffers"] == 2 and streamed[1]["plan"]["lanes"] == 2
    evidence.add({"type": "agreement", "level": "capture on a GPU", "what": "streamed, resident", "error": 0.0})


def test_replayed_layers_equal_resident(checkpoint, sequences, resident):
    """From the third pass on every layer of an unsegmented prompt is a replayed graph."""
    from taugate.target.capture import Capture, SequenceDone
    from taugate.target.kernels import kernel_path

    capture = Capture(str(checkpoint), "fla", "bfloat16", "cuda", TAPS, engine="streamed")
    for _ in range(5):
        with kernel_path("fla", capture.model_type, "cuda") as ran:
            states = {e.index: e.tensors for e in capture.states(sequences) if isinstance(e, SequenceDone)}
        assert_equal(resident[0], states)
        layers = {where for what, layers in ran.require()["layers"].items() if "delta_rule" in what for where in layers}
        assert layers == {layer for layer in range(LAYERS) if (layer + 1) % 4}
    facts = capture.facts()
    assert facts["plan"]["graphs"] and facts["graphs"]["recorded"] > 0 and "refused" not in facts["graphs"]
    assert facts["files"]["pinned"] > 0, "files on a RAM disk are pinned however little is free beside them"


def test_fla_ran_in_every_delta_net_layer_and_nothing_else_did(streamed):
    layers = streamed[2]["layers"]
    linear = [layer for layer in range(LAYERS) if (layer + 1) % 4]
    rules = {what: where for what, where in layers.items() if "delta_rule" in what}
    assert set(rules) == {"torch_chunk_gated_delta_rule <- fla.ops.gated_delta_rule.chunk"}
    assert list(rules.values()) == [linear]


def test_torch_path_is_equal_in_both_engines_and_near_fla(checkpoint, sequences, streamed, evidence):
    """The two paths differ by roundings that grow with depth: seven to nine a layer on random weights."""
    from taugate.numerics.measures import in_roundings, relative_error

    here = captured(checkpoint, sequences, "streamed", path="torch")[0]
    assert_equal(here, captured(checkpoint, sequences, "resident", path="torch")[0])
    apart = {
        name: in_roundings(max(relative_error(streamed[0][i][name], here[i][name]) for i in range(4, len(LENGTHS))))
        for name in here[0]
    }
    evidence.add({"type": "agreement", "level": "capture on a GPU", "what": "fla, torch", "worst_f": apart["tap.0"]})
    assert 0.5 < apart["tap.0"] < 9
    assert apart[f"tap.{LAYERS - 1}"] < 9 * LAYERS


@pytest.mark.parametrize(("ceiling", "buffers", "graphs"), [(3500, 2, True), (3000, 2, True), (1850, 1, False)])
def test_a_ceiling_is_kept_and_changes_no_state(
    checkpoint, streamed, sequences, warmed, ceiling, buffers, graphs, tmp_path
):
    """In a process of its own, since what counts is all that the process takes, by nvidia-smi."""
    code = f"""
import json, sys, torch
from taugate.target.capture import Capture, SequenceDone
from taugate.target.kernels import kernel_path
from taugate.target.memory import process_bytes
capture = Capture({str(checkpoint)!r}, "fla", "bfloat16", "cuda", {TAPS}, engine="streamed", max_gpu_memory={ceiling})
for _ in range(3):  # graphs are recorded in the second pass
    with kernel_path("fla", capture.model_type, "cuda") as ran:
        events = list(capture.states(json.load(open(sys.argv[1]))))
states = {{e.index: e.tensors for e in events if isinstance(e, SequenceDone)}}
torch.save(states, sys.argv[2])
print(json.dumps([capture.facts(), (process_bytes() or 0) >> 20]))
"""
    (tmp_path / "ids").write_text(json.dumps(sequences))
    command = [sys.executable, "-c", code, str(tmp_path / "ids"), str(tmp_path / "states")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts, taken = json.loads(done.stdout.splitlines()[-1])
    assert (facts["plan"]["buffers"], facts["plan"]["graphs"]) == (buffers, graphs)
    assert facts["plan"]["total"] <= ceiling
    assert (facts["graphs"]["recorded"] >= len(LENGTHS)) == graphs
    assert taken <= ceiling, "torch gives back nothing by itself, so this is the most that was taken"
    import torch

    assert_equal(streamed[0], torch.load(tmp_path / "states"))


def test_a_ceiling_too_low_is_refused_with_the_one_that_would_do(checkpoint, sequences):
    from taugate.errors import GpuMemoryError
    from taugate.target.capture import Capture

    with pytest.raises(GpuMemoryError, match=r"set capture\.max_gpu_memory to \d+ MiB") as refused:
        capture = Capture(str(checkpoint), "fla", "bfloat16", "cuda", TAPS, engine="streamed", max_gpu_memory=1000)
        next(iter(capture.states(sequences)))
    enough = int(re.search(r"to (\d+) MiB", str(refused.value))[1])
    assert captured(checkpoint, sequences, "streamed", max_gpu_memory=enough)[1]["plan"]["total"] <= enough


def test_decay_and_gated_norm_stay_in_fp32(checkpoint):
    import torch

    from taugate.target.capture import Capture

    capture = Capture(str(checkpoint), "fla", "bfloat16", "cuda", [0], engine="resident", final_hidden=False)
    mixer = capture.engine.model.layers[0].linear_attn
    assert (mixer.A_log.dtype, mixer.norm.weight.dtype) == (torch.float32, torch.float32)
    assert mixer.dt_bias.dtype == torch.bfloat16
    assert not torch.equal(mixer.A_log, mixer.A_log.bfloat16().float()), "the stored values need fp32"


@pytest.fixture
def job(checkpoint, sequences, warmed, tmp_path):
    """Popen arguments of a worker that captures the sequences with the whole model on the GPU, by directory."""
    spec = {"model_path": str(checkpoint), "kernel_path": "fla", "dtype": "bfloat16", "device": "cuda", "taps": TAPS,
            "engine": "resident", "sequences": [{"key": f"k{n}", "token_ids": s} for n, s in enumerate(sequences)],
            }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    # It does not ask beforehand whether the model fits, as if somebody else took the memory afterwards.
    before = "import sys; from taugate.target import resident, worker; "
    before += "resident.BESIDE = 0; resident.model_bytes = lambda *given: 0; "
    given = ["--spec", str(tmp_path / "spec.json"), "--out"]
    return lambda out: {
        "args": [sys.executable, "-c", before + "sys.exit(worker.main(sys.argv[1:]))", *given, str(out)],
        "cwd": ROOT, "stdout": subprocess.PIPE, "text": True,
    }  # fmt: skip


@pytest.fixture
def whole(job, tmp_path):
    """What an uninterrupted worker writes: bytes by name."""
    done = subprocess.run(**job(tmp_path / "whole"), check=True)
    assert json.loads(done.stdout.splitlines()[-1])["event"] == "done"
    return contents(tmp_path / "whole")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def test_a_worker_killed_half_way_goes_on_and_the_bytes_are_the_same(job, whole, tmp_path):
    with subprocess.Popen(**job(tmp_path / "out")) as first:
        for line in first.stdout:
            if json.loads(line).get("done") == 3:
                first.kill()
                break
    kept = contents(tmp_path / "out")
    assert 3 <= len(kept) < len(LENGTHS) and kept.items() <= whole.items()
    done = subprocess.run(**job(tmp_path / "out"), check=True)
    states = [event for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "state"]
    assert len(states) == len(LENGTHS) - len(kept), "only the rest was done"
    assert contents(tmp_path / "out") == whole


def test_a_gpu_that_runs_out_of_memory_is_one_sentence_and_loses_nothing(checkpoint, job, whole, tmp_path):
    """Really: another process holds all but the layers' size, a context, and too little for a long prompt's forward."""
    import torch

    from taugate.target.layout import open_layout

    torch.cuda.empty_cache()
    layout = open_layout(checkpoint)
    weights = sum(stored.nbytes for layer in range(LAYERS) for stored in layout.layer_tensors(layer).values())
    room = (weights >> 20) + 900
    hog = [sys.executable, "benchmarks/capture_gpu.py", "hog", "--leave-mib", str(room)]
    with subprocess.Popen(hog, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert json.loads(holder.stdout.readline())["left_mib"] <= room
        done = subprocess.run(**job(tmp_path / "out"), check=False)
        holder.stdin.close()
    said = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and said["event"] == "error", done.stdout[-500:]
    assert re.match(r"the GPU has too little memory for the capture \(CUDA out of memory[^\n]*capture\.max_gpu_memory",
                    said["sentence"]), said  # fmt: skip
    kept = contents(tmp_path / "out")
    assert len(kept) < len(LENGTHS) and kept.items() <= whole.items()
    assert f"{len(kept)} of {len(LENGTHS)} sequences are captured and stay" in said["sentence"]
    assert subprocess.run(**job(tmp_path / "out"), check=False).returncode == 0, "with the memory back it goes on"
    assert contents(tmp_path / "out") == whole
