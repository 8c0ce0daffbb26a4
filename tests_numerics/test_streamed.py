"""The two engines and the conventions of a state, on every family and on a CPU, bit for bit where that is the claim."""

from __future__ import annotations

import json

import pytest

from tests_infra.checkpoints import FAMILIES, write_checkpoint

pytestmark = pytest.mark.numerics(level="capture engines")
TAPS = [0, 2, 3]  # the models have four layers
LENGTHS = (1, 5, 64, 150)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    """A checkpoint of the family, one sequence of each length, and what both engines make of them in bf16."""
    import torch

    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("family") / request.param
    write_checkpoint(directory, request.param)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 64, (length,), generator=generator).tolist() for length in LENGTHS]
    states = {engine: capture(directory, sequences, engine=engine)[0] for engine in ("resident", "streamed")}
    return directory, sequences, states


def capture(directory, sequences, taps=TAPS, dtype="bfloat16", **options):
    """States by sequence, and the evidence of the kernel path."""
    from taugate.target.capture import Capture, SequenceDone
    from taugate.target.kernels import kernel_path

    engine = Capture(str(directory), "torch", dtype, "cpu", taps, **options)
    with kernel_path("torch", engine.model_type, "cpu") as ran:
        states = {e.index: e.tensors for e in engine.states(sequences) if isinstance(e, SequenceDone)}
    return states, ran.require()


def assert_equal(some, others):
    import torch

    assert some.keys() == others.keys()
    for index in some:
        assert some[index].keys() == others[index].keys()
        for name, state in some[index].items():
            assert torch.equal(state, others[index][name]), f"{name} of sequence {index}"


def test_streamed_equals_resident(family, evidence):
    _, sequences, states = family
    assert_equal(states["streamed"], states["resident"])
    assert all(
        tensor.shape == (len(ids), 32) for i, ids in enumerate(sequences) for tensor in states["streamed"][i].values()
    )
    evidence.add({"type": "agreement", "level": "capture engines", "what": "streamed, resident", "error": 0.0})


def test_streamed_is_what_transformers_computes_from_the_weights_in_memory(family):
    """tap.L is hidden_states[L + 1] but at the last layer, where the raw output is kept and final_hidden is normed.

    The reference never saw the files: the model from the same seed, with A_log and gated norm in fp32 as stored.
    """
    import torch

    from taugate.target.kernels import kernel_path
    from tests_infra.checkpoints import text_model

    directory, sequences, states = family
    model = text_model(directory.name)
    for name, parameter in model.named_parameters():
        if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")):
            parameter.data = parameter.data.float()
    for index, ids in enumerate(sequences):
        with torch.inference_mode(), kernel_path("torch", model.config.model_type, "cpu"):
            hidden = model.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        found = states["streamed"][index]
        for layer in (0, 2):
            assert torch.equal(found[f"tap.{layer}"], hidden[layer + 1][0]), f"tap.{layer} of {len(ids)} tokens"
        assert torch.equal(found["final_hidden"], hidden[4][0])
        with torch.inference_mode():
            assert torch.equal(model.model.norm(found["tap.3"][None])[0], found["final_hidden"])
        assert not torch.equal(found["tap.3"], found["final_hidden"])


def test_our_loader_gives_a_gpu_what_transformers_loads(family):
    """The way by which one GPU is filled, here on a CPU: layers by our loader, embedding rows from the file."""
    from taugate.target.capture import Capture
    from taugate.target.kernels import kernel_path

    directory, sequences, states = family
    capture = Capture(str(directory), "torch", "bfloat16", "cpu", TAPS, engine="resident")
    capture.engine._one_gpu, capture.engine.model = True, capture.engine._filled()
    with kernel_path("torch", capture.model_type, "cpu"):
        assert_equal({0: capture(sequences[3])}, {0: states["resident"][3]})


def test_a_capture_without_final_hidden_stops_at_the_deepest_tap(family):
    """The same taps, and nothing of the layers behind is as much as read."""
    import torch

    directory, sequences, states = family
    for engine in ("resident", "streamed"):
        found, ran = capture(directory, sequences[3:], taps=[0, 1], engine=engine, final_hidden=False)
        assert set(found[0]) == {"tap.0", "tap.1"}
        assert torch.equal(found[0]["tap.0"], states["streamed"][3]["tap.0"])
        assert all(max(layers) <= 1 for layers in ran["layers"].values())


def test_progress_counts_layers(family):
    from taugate.target.capture import Capture, LayerDone
    from taugate.target.kernels import kernel_path

    directory, sequences, _ = family
    engine = Capture(str(directory), "torch", "bfloat16", "cpu", TAPS, engine="streamed")
    with kernel_path("torch", engine.model_type, "cpu"):
        layers = [e.to_json() for e in engine.states(sequences[:2]) if isinstance(e, LayerDone)]
    assert [(e["layer"], e["of"], e["prompts"]) for e in layers] == [(n, 4, 2) for n in range(4)]
    assert all(e["bytes"] > 0 for e in layers) and layers[-1]["left_s"] == 0


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hybrid") / "target"
    write_checkpoint(directory, "qwen3_5")
    return directory


@pytest.fixture
def short_segments(monkeypatch):
    """Pieces of 64 tokens, so that a short sequence has several."""
    from taugate.target import resident, segments, streamed

    def cut(length, size=64):
        return segments_of(length, size)

    segments_of = segments.segments
    monkeypatch.setattr(resident, "segments", cut)
    monkeypatch.setattr(streamed, "segments", cut)


IDS = [n * 7 % 64 for n in range(230)]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "llama"])
def test_segments_are_equal_in_both_engines_and_near_the_whole(name, tmp_path, monkeypatch, request):
    """Recurrent, convolution and key/value state are carried: in fp32 the whole sequence comes out but for rounding.

    Dropping the carried state would be off by thousands of roundings of fp32.
    """
    from taugate.numerics.measures import relative_error

    write_checkpoint(tmp_path / "target", name)
    whole = capture(tmp_path / "target", [IDS], dtype="float32", engine="streamed")[0][0]
    request.getfixturevalue("short_segments")
    pieces = {e: capture(tmp_path / "target", [IDS], dtype="float32", engine=e)[0] for e in ("resident", "streamed")}
    assert_equal(pieces["streamed"], pieces["resident"])
    for state, reference in zip(pieces["streamed"][0].values(), whole.values(), strict=True):
        assert relative_error(state, reference) < 2**-11, "beyond what a few flipped roundings to bf16 make"


def test_segments_cover_a_sequence_and_leave_no_crumb():
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as some

    from taugate.target.segments import SEGMENT, SHORTEST, joined, segments

    assert SEGMENT % SHORTEST == 0, "the chunks of the gated delta rule must not move"

    @settings(deadline=None, derandomize=True)
    @given(some.integers(1, 5000), some.sampled_from([64, 128, 1024]))
    def check(length, size):
        pieces = segments(length, size)
        assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
        assert pieces[-1][1] == length
        assert all(begin % 64 == 0 for begin, _ in pieces)
        assert all(end - begin <= size + 63 for begin, end in pieces)
        assert len(pieces) == 1 or min(end - begin for begin, end in pieces) >= SHORTEST
        states = torch.arange(length).view(1, length, 1)
        assert torch.equal(joined([states[:, begin:end] for begin, end in pieces]), states)

    check()


def test_a_sequence_does_not_depend_on_its_company(hybrid):
    """Batch neutrality: every sequence is its own forward, whatever else is captured, and in whatever order."""
    sequences = [IDS[:n] for n in (3, 90, 17)]
    together = capture(hybrid, sequences, engine="streamed")[0]
    for index, ids in enumerate(sequences):
        assert_equal({0: capture(hybrid, [ids], engine="streamed")[0][0]}, {0: together[index]})
    turned = capture(hybrid, sequences[::-1], engine="streamed")[0]
    assert_equal({2 - index: states for index, states in turned.items()}, together)


def test_batches_and_padding_differ_by_roundings_only(hybrid, evidence):
    """What this project avoids, bounded in units of f: a batch of two with right padding, left padding with a mask.

    Left padding moves the chunks of the gated delta rule; right padding moves nothing but kernels' shapes.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from taugate.numerics.measures import in_roundings, relative_error
    from taugate.target.kernels import kernel_path

    model = AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.bfloat16, local_files_only=True).model.eval()
    ids, other, pad = IDS[:90], IDS[30:150], 37

    def run(rows, mask):
        with torch.inference_mode(), kernel_path("torch", "qwen3_5_text", "cpu"):
            return model(torch.tensor(rows), attention_mask=torch.tensor(mask), use_cache=False).last_hidden_state

    alone = run([ids], [[1] * 90])[0]
    right = run([ids + [0] * 30, other], [[1] * 90 + [0] * 30, [1] * 120])[0, :90]
    left = run([[0] * pad + ids], [[0] * pad + [1] * 90])[0, pad:]
    apart = {name: in_roundings(relative_error(state, alone)) for name, state in (("right", right), ("left", left))}
    evidence.add({"type": "agreement", "level": "capture engines", "what": "padding", **apart})
    assert apart["right"] < 4
    assert apart["left"] < 12
    unmasked = run([[0] * pad + ids], [[1] * (pad + 90)])[0, pad:]
    assert in_roundings(relative_error(unmasked, alone)) > 30, "pads that count are seen"


def test_the_bare_model_and_the_one_with_a_head_are_the_same(hybrid):
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from taugate.target.kernels import kernel_path
    from taugate.target.resident import _RENAMED
    from taugate.target.skeleton import text_model_config

    given = {"dtype": torch.bfloat16, "local_files_only": True}
    bare = AutoModel.from_pretrained(hybrid, config=text_model_config(hybrid), key_mapping=_RENAMED, **given).eval()
    headed = AutoModelForCausalLM.from_pretrained(hybrid, **given).model.eval()
    with torch.inference_mode(), kernel_path("torch", "qwen3_5_text", "cpu"):
        ids = torch.tensor([IDS[:100]])
        some = bare(ids, output_hidden_states=True, use_cache=False).hidden_states
        others = headed(ids, output_hidden_states=True, use_cache=False).hidden_states
    assert len(some) == len(others) == 5
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_decay_and_gated_norm_stay_in_fp32(hybrid, tmp_path):
    """Values that bf16 cannot hold arrive in the modules of a bf16 forward as they are stored; others are bf16."""
    import torch
    from safetensors.torch import load_file, save_file

    from taugate.target.capture import Capture
    from taugate.target.kernels import kernel_path

    stored = {}
    for file in hybrid.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name in tensors:
            if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")):
                tensors[name] = stored[name] = tensors[name] + 0.00123
        save_file(tensors, tmp_path / file.name)
    for engine in ("resident", "streamed"):
        capture = Capture(str(tmp_path), "torch", "bfloat16", "cpu", [0], engine=engine)
        with kernel_path("torch", capture.model_type, "cpu"):
            capture(IDS)
        layers = capture.engine.model.layers if engine == "resident" else capture.engine.skeleton.layers
        for layer in (0, 1, 2):
            mixer = layers[layer].linear_attn
            for name, value in (("A_log", mixer.A_log), ("norm.weight", mixer.norm.weight)):
                if engine == "resident" or layer == 2:  # a streamed layer's memory has been taken by the next but one
                    assert torch.equal(value, stored[f"model.language_model.layers.{layer}.linear_attn.{name}"])
                assert value.dtype == torch.float32
            assert mixer.dt_bias.dtype == mixer.out_proj.weight.dtype == torch.bfloat16


def test_what_is_not_finite_is_refused(hybrid, tmp_path):
    from safetensors.torch import load_file, save_file

    from taugate.errors import CheckpointError

    for file in hybrid.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for name in tensors:
                if name.endswith("layers.2.mlp.up_proj.weight"):
                    tensors[name][0, 0] = float("nan")
            save_file(tensors, tmp_path / file.name)
        else:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    for engine in ("resident", "streamed"):
        with pytest.raises(CheckpointError, match=r"tap\.2 of a sequence of 230 tokens is not finite"):
            capture(tmp_path, [IDS], engine=engine)


@pytest.mark.parametrize(
    ("taps", "final", "said"),
    [([4], True, r"taps \[4\] are outside the target's layers 0…3"), ([], False, "no tap and no final_hidden")],
)
def test_wishes_that_make_no_sense_are_refused(hybrid, taps, final, said):
    from taugate.errors import CheckpointError

    for engine in ("resident", "streamed"):
        with pytest.raises(CheckpointError, match=said):
            capture(hybrid, [IDS], taps=taps, engine=engine, final_hidden=final)


def test_a_token_outside_the_vocabulary_is_refused(hybrid):
    from taugate.errors import CheckpointError

    with pytest.raises(CheckpointError, match="token 64 is outside the target's vocabulary of 64"):
        capture(hybrid, [[3, 64]], engine="streamed")


def test_files_are_pinned_if_half_of_what_is_free_allows_or_they_lie_on_a_ram_disk(hybrid, monkeypatch):
    import torch

    from taugate.target import streamed

    weights = sum(file.stat().st_size for file in hybrid.glob("*.safetensors"))
    for ram, free, pinnable in ((True, 1000, True), (False, 1000, False), (False, 2 * weights, True)):
        monkeypatch.setattr(streamed, "on_ram_disk", lambda file, ram=ram: ram)
        monkeypatch.setattr(streamed.memory, "host_bytes", lambda free=free: free)
        engine = streamed.Streamed(hybrid, "torch", torch.bfloat16, "cpu", [0], True, None)
        assert engine._pinnable() is pinnable


def test_code_that_decides_numbers_is_in_the_identity():
    """Every module that the forward goes through is hashed into the key of a state."""
    from pathlib import Path

    import taugate
    from taugate.target.capture import CODE

    package = Path(taugate.__file__).parent
    assert all((package / name).is_file() for name in CODE)
    forward = {"kernels", "resident", "segments", "skeleton", "streamed", "loading", "layout", "shards"}
    assert {Path(name).stem for name in CODE} >= forward
    json.dumps(CODE)


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_prompts_are_embedded_ahead_as_far_as_there_is_time(steps):
    """The rest in their turn, each once; what waits on the host has no place on the GPU before its turn."""
    import torch

    from taugate.target.lanes import Lanes
    from taugate.target.waiting import Waiting

    for where, expected in (("gpu", [0, 1, 2, 3][:steps]), ("host", [])):
        embedded = []

        def embed(place, embedded=embedded):
            embedded.append(place)
            return torch.full((1, 2, 2), float(place))

        waiting = Waiting(embed, 4, "cuda" if where == "host" else "cpu", where)
        ahead = waiting.embed_ahead(Lanes("cpu", 1, recorded=0))
        for _ in range(steps):
            next(ahead, None)
        assert embedded == expected
        if where == "gpu":
            assert [float(waiting.take(place)[0, 0, 0]) for place in range(4)] == [0, 1, 2, 3]
            waiting.put(2, torch.ones(1, 2, 2))
            assert torch.equal(waiting.last(2), torch.ones(1, 2, 2)) and waiting.hidden[2] is None
