"""The warm-up runs the target's kernels on a narrow model; what it does on a GPU is in test_capture_gpu.py."""

from __future__ import annotations

import json

import pytest

from tests_infra.checkpoints import FAMILIES, write_checkpoint


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("warm") / request.param
    write_checkpoint(directory, request.param)
    return directory


def test_the_narrow_model_has_the_targets_heads_and_runs(checkpoint):
    import torch

    from taugate.target.kernels import kernel_path
    from taugate.target.segments import segments
    from taugate.target.skeleton import text_model_config
    from taugate.target.warmup import _model, _run, small_config

    config, whole = small_config(checkpoint), text_model_config(checkpoint)
    if checkpoint.name in ("qwen3", "llama"):
        assert config is None, "there is nothing to compile for full attention"
        return
    names = [name for name in vars(config) if name.startswith("linear_") or name.startswith("num_attention")]
    assert "linear_num_value_heads" in names
    assert [getattr(config, name) for name in names] == [getattr(whole, name) for name in names]
    model = _model(config, torch.bfloat16, "cpu")
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    with kernel_path("torch", config.model_type, "cpu") as ran:
        for length in (70, 200):
            _run(model, config, tuple(segments(length, 64)))
    assert sum(ran.calls.values()) > 0


@pytest.mark.parametrize(("path", "why"), [("torch", "compiles nothing"), ("fla", "on cpu")])
def test_without_a_gpu_there_is_nothing_to_do(tmp_path, path, why):
    from taugate.target.warmup import main, warm_up

    spec = {"model_path": "unused", "kernel_path": path, "dtype": "bfloat16", "device": "cpu", "sequences": []}
    assert why in warm_up(spec)["skipped"]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    assert main(["--spec", str(tmp_path / "spec.json")]) == 0


class Package:
    """A host's package whose warm-up gives `answer`."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def run(self, module, *args, deadline, what):
        self.asked.append((module, *args))
        return self.answer


def test_too_little_memory_is_said_and_stops_no_window():
    from taugate.pipeline.warm import warm_up

    said: list[str] = []
    package = Package({"event": "done", "refused": "that takes 600 MiB, and 100 MiB are free", "compiled": 0})
    warm_up(package, "/w/spec.json", "fla", said.append)
    assert package.asked == [("target.warmup", "--spec", "/w/spec.json", "--if-it-fits")]
    assert said == [
        "the capture will compile its kernels inside the window: that takes 600 MiB, and 100 MiB are free"
    ]
    warm_up(Package({"event": "done", "compiled": 9, "cached": 2, "seconds": 61.2}), "s", "fla", said.append)
    assert said[-1] == "kernels ready after 61 s, 9 compiled, 2 from the cache"
    nobody = Package(None)
    assert "skipped" in warm_up(nobody, "s", "torch", said.append) and nobody.asked == []


def test_too_little_memory_is_refused_with_the_numbers(monkeypatch, tmp_path, capsys):
    import torch

    from taugate.errors import GpuMemoryError
    from taugate.target import warmup

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 20, 48 << 30))
    with pytest.raises(GpuMemoryError, match="takes 600 MiB .* beside the CUDA context, and 100 MiB are free"):
        warmup._require_free(600 << 20)
    monkeypatch.setattr(warmup, "warm_up", lambda spec: warmup._require_free(600 << 20))
    (tmp_path / "spec.json").write_text("{}")
    assert warmup.main(["--spec", str(tmp_path / "spec.json")]) == 1
    assert warmup.main(["--spec", str(tmp_path / "spec.json"), "--if-it-fits"]) == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["event"] == "error" and "600 MiB" in first["sentence"]
    assert second == {"event": "done", "refused": first["sentence"], "compiled": 0}


def test_compilations_are_counted_by_tritons_own_listener():
    """A kernel that Triton compiles counts by name, one from its cache only by number; other listeners stay."""
    knobs = pytest.importorskip("triton").knobs
    from types import SimpleNamespace

    from taugate.target.compilations import counted_compilations

    seen: list[str] = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda **event: seen.append("other")
    try:
        with counted_compilations(True) as count:
            for hit in (False, True, True):
                source = SimpleNamespace(fn=SimpleNamespace(__name__="chunk_fwd_kernel_o"))
                knobs.compilation.listener(src=source, metadata={}, metadata_group={}, times=None, cache_hit=hit)
        assert count.to_json() == {"compiled": 1, "cached": 2, "kernels": ["chunk_fwd_kernel_o"]}
        assert seen == ["other"] * 3
    finally:
        knobs.compilation.listener = before
