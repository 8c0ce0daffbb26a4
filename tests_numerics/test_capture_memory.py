"""What a capture may take on a GPU, and how weights get there: planned and checked without one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from taugate.errors import CheckpointError, GpuMemoryError
from taugate.target import memory
from taugate.target.memory import MIB, parse_limit, plan_streaming, scratch_bytes

SIZES = some.integers(1, 4096).map(lambda mib: mib * MIB)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(*[SIZES] * 6)
def test_a_plan_stays_within_the_limit_or_is_refused_with_what_would_do(
    limit, context, layer, scratch, waiting, moving
):
    import re

    asked = (context, layer, scratch, waiting, moving, "capture.max_gpu_memory")
    try:
        plan = plan_streaming(limit, *asked)
    except GpuMemoryError as refused:
        enough = int(re.search(r"to (\d+) MiB or more", str(refused))[1]) * MIB
        assert enough > limit
        plan = plan_streaming(enough, *asked)
        assert (plan.buffers, plan.lanes, plan.waiting) == (1, 1, "host"), "the smallest plan, and no smaller number"
        with pytest.raises(GpuMemoryError):
            plan_streaming(enough - MIB, *asked)
    else:
        assert plan.total <= limit
        assert plan.total >= context + plan.buffers * layer + scratch
        more = plan_streaming(limit + 4096 * MIB, *asked)
        assert (more.buffers, more.lanes) >= (plan.buffers, plan.lanes), "more memory never makes a plan slower"


def test_a_27b_layer_fits_three_gigabytes_with_two_buffers_and_1_8_with_one():
    """By arithmetic, with a context of 500 MiB: 4096 tokens in prompts of 1024."""
    from types import SimpleNamespace

    from benchmarks.shape27b import TEXT

    config = SimpleNamespace(**TEXT, layer_types=["linear_attention", "full_attention"])
    state, layer = 5120 * 2, 766_600_000
    scratch = scratch_bytes(config, 1024, 2, "fla")
    asked = (500 * MIB, layer, scratch, 4096 * state, 5 * 1024 * state, "the limit")
    assert plan_streaming(int(3.0e9), *asked).buffers == 2
    assert plan_streaming(int(1.8e9), *asked).buffers == 1
    with pytest.raises(GpuMemoryError, match="one layer 731"):
        plan_streaming(int(1.3e9), *asked)


def test_arguments_of_layers_count_once_for_each_length():
    """Cosines and sines as the model itself makes them, at most twice as much since few of its elements may turn."""
    import torch
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=16)
    made = 0
    for length in (100, 37):
        places = torch.arange(length)[None]
        cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, length, 64, dtype=torch.bfloat16), places)
        made += cos.nbytes + sin.nbytes + places.nbytes
    counted = memory.arguments_bytes(config, [100, 37, 100, 37, 37], 2)
    assert made <= counted <= 2 * made


def test_the_page_tables_of_pinned_files_count():
    asked = (500 * MIB, 700 * MIB, 100 * MIB, 10 * MIB, 10 * MIB, "the limit")
    plain, pinned = plan_streaming(4000 * MIB, *asked), plan_streaming(4000 * MIB, *asked, tables=100 * MIB)
    assert pinned.total == plain.total + 100 * MIB and pinned.way == plain.way
    assert plan_streaming(plain.total, *asked, tables=100 * MIB).total <= plain.total


def test_what_recorded_launches_keep_counts_for_each_lane_that_records():
    asked = (500 * MIB, 700 * MIB, 100 * MIB, 10 * MIB, 10 * MIB, "the limit")
    for limit, lanes, kept in ((4000 * MIB, 2, True), (2270 * MIB, 1, True), (2100 * MIB, 1, False)):
        plain = plan_streaming(limit, *asked)
        keeping = plan_streaming(limit, *asked, outputs=7 * MIB)
        assert plain.way == keeping.way == (2, lanes, kept, "gpu")
        assert keeping.total == plain.total + (7 * MIB * lanes if kept else 0)


def test_files_are_pinned_only_where_the_plan_stays_as_fast():
    from functools import partial

    from taugate.target.streamed import Streamed

    class Loader:
        pinned = 0

        def pin(self, layers):
            self.pinned += len(list(layers))

    asked = (500 * MIB, 700 * MIB, 100 * MIB, 10 * MIB, 10 * MIB, "the limit")
    total = plan_streaming(8000 * MIB, *asked).total
    for limit, pins in ((total, False), (total + 99 * MIB, False), (total + 100 * MIB, True)):
        engine = Streamed.__new__(Streamed)
        engine._loader, engine._pinned, engine._tensors = Loader(), False, [{}, {}]
        plan = plan_streaming(limit, *asked)
        found = engine._pin(plan, partial(plan_streaming, limit, *asked, tables=100 * MIB))
        assert (engine._pinned, engine._loader.pinned) == (pins, 2 * pins)
        assert found.way == plan.way and found.total <= limit and bool(found.tables) is pins


def test_the_fallback_needs_more_scratch_than_fla_and_length_counts():
    from types import SimpleNamespace

    from benchmarks.shape27b import TEXT

    config = SimpleNamespace(**TEXT, layer_types=["linear_attention"])
    fla, torch_path = (scratch_bytes(config, 1024, 2, path) for path in ("fla", "torch"))
    assert fla < torch_path < 4 * fla
    assert scratch_bytes(config, 2048, 2, "fla") == 2 * fla
    assert scratch_bytes(config, 1024, 2, "fla", past=8192) > fla


@pytest.mark.parametrize(
    ("value", "mib"),
    [(None, None), ("auto", None), (3000, 3000), ("3000 MiB", 3000), ("6GiB", 6144), ("1.5 GiB", 1536)],
)
def test_a_limit_is_read(value, mib):
    assert parse_limit(value) == (None if mib is None else mib * MIB)


@pytest.mark.parametrize("value", ["6GB", "", "-1", "much", True])
def test_a_limit_that_is_none_is_refused(value):
    with pytest.raises(GpuMemoryError, match="max_gpu_memory is"):
        parse_limit(value)


def test_free_memory_of_the_host_is_read():
    assert memory.host_bytes() > 100 * MIB


@pytest.fixture
def stored(tmp_path):
    """Three tensors in one file at uneven offsets, and their values."""
    import torch
    from safetensors.torch import save_file

    from taugate.target.shards import read_header

    values = {
        "a": torch.randn(7, 3, dtype=torch.bfloat16),
        "b": torch.randn(1000, 33, dtype=torch.bfloat16),
        "c": torch.randn(5),
    }
    save_file(values, tmp_path / "x.safetensors")
    return values, read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("chunk", [64, 4096, 16 << 20])
def test_weights_arrive_in_chunks_and_are_converted(stored, chunk, monkeypatch):
    import torch

    from taugate.target import loading

    monkeypatch.setattr(loading, "CHUNK", chunk)
    values, tensors = stored
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.float32}
    buffer = torch.empty(loading.aligned_bytes(tensors, dtypes), dtype=torch.uint8)
    there = loading.views(buffer, tensors, dtypes)
    loading.Loader("cpu").start(tensors, there).arrive()
    for key, value in values.items():
        assert there[key].data_ptr() % loading.ALIGNMENT == buffer.data_ptr() % loading.ALIGNMENT
        assert torch.equal(there[key], value.to(dtypes[key]))


def test_a_file_that_shrinks_while_it_is_read_is_named(stored, tmp_path):
    import torch

    from taugate.target import loading

    _, tensors = stored
    with open(tmp_path / "x.safetensors", "r+b") as stream:
        stream.truncate(4000)
    dtypes = {key: torch.float32 for key in tensors}
    buffer = torch.empty(loading.aligned_bytes(tensors, dtypes), dtype=torch.uint8)
    under_way = loading.Loader("cpu").start(tensors, loading.views(buffer, tensors, dtypes))
    with pytest.raises(CheckpointError, match=r"x\.safetensors ended at byte 4000 while it was read"):
        under_way.arrive()


def test_only_the_rows_asked_for_are_read(stored):
    import torch

    from taugate.target.loading import read_rows

    values, tensors = stored
    rows = torch.tensor([999, 0, 5, 5])
    assert torch.equal(read_rows(tensors["b"], rows), values["b"][rows])
    with pytest.raises(CheckpointError, match="token 1000 is outside the target's vocabulary of 1000"):
        read_rows(tensors["b"], torch.tensor([1000]))
