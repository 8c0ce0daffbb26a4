"""The target's checkpoint: every tensor finds its module, and whatever is wrong is one sentence with file and key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from taugate.errors import CheckpointError
from taugate.target.checkpoint import FAMILIES, find_checkpoint, read_target
from taugate.target.layout import open_layout
from taugate.target.shards import INDEX
from tests_infra import checkpoints

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
KEY = "model.language_model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """All families on the disk, and their state dicts."""
    root = tmp_path_factory.mktemp("checkpoints")
    return root, {family: checkpoints.write_checkpoint(root / family, family) for family in checkpoints.FAMILIES}


@pytest.fixture
def broken(written, tmp_path):
    """A copy of the qwen3_5 checkpoint to break."""
    shutil.copytree(written[0] / "qwen3_5", tmp_path / "target")
    return tmp_path / "target"


def read(stored):
    """A stored tensor's bytes, piece by piece."""
    parts = []
    for piece in stored.pieces:
        with open(piece.file, "rb") as stream:
            stream.seek(piece.offset)
            parts.append(stream.read(piece.nbytes))
    return b"".join(parts)


def rewrite(directory, change):
    """Change the tensors of all shards: `change` gets and returns a dict by stored key. Index and shards stay two."""
    from safetensors.torch import load_file, save_file

    tensors = {name: load_file(directory / name) for name in (FIRST, SECOND)}
    for shard in tensors:
        tensors[shard] = change(tensors[shard])
        save_file(tensors[shard], directory / shard)
    index = {"metadata": {}, "weight_map": {key: shard for shard, keys in tensors.items() for key in keys}}
    (directory / INDEX).write_text(json.dumps(index))


def refused(directory, error=CheckpointError):
    with pytest.raises(error) as caught:
        open_layout(directory)
    sentence = str(caught.value)
    assert "\n" not in sentence and str(directory) in sentence
    return sentence


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_gets_the_bytes_that_its_checkpoint_stores(written, family):
    """Prefixes, shards, experts stored one by one: what a layer is given is what transformers' own module holds."""
    import torch

    root, states = written
    layout = open_layout(root / family)
    expected = {key.removeprefix("model."): value for key, value in states[family].items()}
    assert layout.tensors.keys() | {"lm_head.weight"} == expected.keys()
    for key, stored in {**layout.tensors, "lm_head.weight": layout.head}.items():
        value = expected[key].float() if stored.dtype == "F32" else expected[key]
        assert stored.shape == tuple(value.shape), key
        assert read(stored) == value.contiguous().view(torch.uint8).numpy().tobytes(), key
    layers = {f"layers.{layer}.{key}" for layer in range(4) for key in layout.layer_tensors(layer)}
    assert layers | layout.outer_tensors().keys() == layout.tensors.keys()
    linear = [key for key in layout.tensors if key.endswith("A_log")]
    assert len(layout.fp32_keys) == 2 * len(linear), "A_log and the gated norm, and nothing else"


def test_transformers_itself_loads_what_these_tests_call_a_checkpoint(written):
    """Otherwise they would prove something about a layout that nobody has."""
    import torch
    from transformers import AutoModelForCausalLM

    root, states = written
    for family in ("qwen3_5", "qwen3_next"):
        model = AutoModelForCausalLM.from_pretrained(root / family, dtype=torch.bfloat16, local_files_only=True)
        for key, value in model.state_dict().items():
            assert torch.equal(value, states[family][key]), f"{family} {key}"


class TestRefused:
    def test_a_family_that_is_not_supported(self, broken):
        (broken / "config.json").write_text(json.dumps({"model_type": "mamba2", "hidden_size": 8}))
        sentence = refused(broken)
        assert "'mamba2'" in sentence and "qwen3_5, qwen3_5_moe, qwen3_next, qwen3, llama" in sentence

    def test_a_quantized_checkpoint(self, broken):
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
        assert "quantized checkpoint (fp8)" in refused(broken)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"text_config": "x"}, "config.json is not a JSON object"),
            ({"quantization_config": [1]}, "quantized checkpoint (unknown)"),
        ],
    )
    def test_a_config_with_something_else_in_an_objects_place(self, broken, change, said):
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(config | change))
        assert said in refused(broken)

    @pytest.mark.parametrize("change", [{"num_hidden_layers": "eight"}, {"eos_token_id": "end"}, {"vocab_size": None}])
    def test_a_config_with_something_else_in_a_numbers_place(self, broken, change):
        config = json.loads((broken / "config.json").read_text())
        config["text_config"] |= change
        (broken / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"config\.json holds something else than a number \(.*copy the"):
            read_target(broken)

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_a_config_that_is_no_json_object(self, broken, text):
        (broken / "config.json").write_text(text)
        assert "config.json is not" in refused(broken)

    def test_a_truncated_shard(self, broken):
        data = (broken / SECOND).read_bytes()
        (broken / SECOND).write_bytes(data[:-7])
        sentence = refused(broken)
        assert f"{SECOND} is {len(data) - 7} bytes long but its header needs {len(data)}" in sentence

    def test_a_shard_with_a_cut_header(self, broken):
        (broken / FIRST).write_bytes((broken / FIRST).read_bytes()[:100])
        assert f"{FIRST} is not a readable safetensors file" in refused(broken)

    def test_a_missing_shard(self, broken):
        (broken / SECOND).unlink()
        assert f"names {SECOND}, which is missing" in refused(broken)

    def test_shards_without_their_index(self, broken):
        (broken / INDEX).unlink()
        assert f"{INDEX} is missing, although {FIRST} is there" in refused(broken)

    @pytest.mark.parametrize("text", ['{"weight_map": ', '{"metadata": {}}', f'{{"weight_map": {{"a": "{FIRST}"}}}}'])
    def test_an_unreadable_index(self, broken, text):
        """The last one lacks metadata, without which transformers ends in a KeyError."""
        (broken / INDEX).write_text(text)
        assert f"{INDEX} is not a readable index" in refused(broken)

    def test_a_key_that_the_index_places_in_the_wrong_shard(self, broken):
        index = json.loads((broken / INDEX).read_text())
        index["weight_map"][KEY] = FIRST if index["weight_map"][KEY] == SECOND else SECOND
        (broken / INDEX).write_text(json.dumps(index))
        assert f"lacks {KEY}, which {INDEX} places there" in refused(broken)

    def test_a_key_that_no_module_takes(self, broken):
        extra = KEY.replace("up_proj", "lora_A")
        rewrite(broken, lambda t: t | {extra: t[KEY].clone()} if KEY in t else t)
        sentence = refused(broken)
        assert f"{SECOND}: {extra} belongs to no module" in sentence or f"{FIRST}: {extra} belongs" in sentence

    def test_a_layer_too_many(self, broken):
        """A config of fewer layers than there are: the states would be of another model."""
        config = json.loads((broken / "config.json").read_text())
        config["text_config"] |= {"num_hidden_layers": 3, "layer_types": config["text_config"]["layer_types"][:3]}
        (broken / "config.json").write_text(json.dumps(config))
        assert "model.language_model.layers.3." in refused(broken)

    def test_a_missing_key(self, broken):
        rewrite(broken, lambda t: {key: value for key, value in t.items() if key != KEY})
        assert "lacks layers.2.mlp.up_proj.weight of the model" in refused(broken)

    def test_a_missing_head(self, broken):
        rewrite(broken, lambda t: {key: value for key, value in t.items() if key != "lm_head.weight"})
        assert "lacks lm_head.weight, and config.json does not tie" in refused(broken)

    def test_a_wrong_shape(self, broken):
        rewrite(broken, lambda t: t | {KEY: t[KEY][:-1].contiguous()} if KEY in t else t)
        sentence = refused(broken)
        assert f"{KEY} has shape [47, 32], but config.json asks for [48, 32]" in sentence

    def test_a_wrong_dtype(self, broken):
        import torch

        rewrite(broken, lambda t: t | {KEY: t[KEY].to(torch.float8_e4m3fn)} if KEY in t else t)
        assert f"{KEY} is stored as F8_E4M3; a target is captured from BF16, F16, F32 only" in refused(broken)

    def test_an_expert_that_is_missing(self, written, tmp_path):
        shutil.copytree(written[0] / "qwen3_next", tmp_path / "target")
        gone = "model.layers.1.mlp.experts.1.up_proj.weight"
        rewrite(tmp_path / "target", lambda t: {key: value for key, value in t.items() if key != gone})
        assert "lacks layers.1.mlp.experts.1.up_proj.weight of the model" in refused(tmp_path / "target")

    def test_a_tokenizer_that_is_missing_or_damaged(self, broken):
        (broken / "tokenizer.json").write_text("{")
        with pytest.raises(CheckpointError, match="tokenizer.json is not valid JSON"):
            read_target(broken)
        (broken / "tokenizer.json").unlink()
        with pytest.raises(CheckpointError, match="has no tokenizer.json"):
            read_target(broken)


class TestHuggingFaceCache:
    @pytest.fixture
    def cache(self, written, tmp_path, monkeypatch):
        """A cache as huggingface_hub lays it out: blobs, links to them, refs/main."""
        repository = tmp_path / "hub" / "models--Org--Tiny"
        snapshot = repository / "snapshots" / "0123abcd"
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir()
        for number, file in enumerate(sorted((written[0] / "qwen3_5").iterdir())):
            shutil.copy(file, repository / "blobs" / str(number))
            (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0123abcd")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        return repository

    def test_a_name_or_a_repository_leads_to_its_snapshot(self, cache):
        snapshot = cache / "snapshots" / "0123abcd"
        assert find_checkpoint("Org/Tiny") == find_checkpoint(cache) == find_checkpoint(snapshot) == snapshot
        assert read_target(snapshot).name == "Tiny"
        assert len(open_layout(snapshot).layer_tensors(0)) > 5

    def test_what_cannot_be_found_says_where_it_was_looked_for(self, cache):
        with pytest.raises(CheckpointError, match=rf"no target checkpoint Org/Other, nor one in {cache.parent}"):
            find_checkpoint("Org/Other")
        with pytest.raises(CheckpointError, match="does not exist; set target.path"):
            find_checkpoint("/nowhere/at/all")
        with pytest.raises(CheckpointError, match="it is a file, not a directory"):
            find_checkpoint(cache / "refs" / "main")

    def test_incomplete_downloads(self, cache):
        (cache / "refs" / "main").write_text("ffff")
        with pytest.raises(CheckpointError, match="names the snapshot ffff, which is missing"):
            find_checkpoint("Org/Tiny")
        (cache / "refs" / "main").unlink()
        (cache / "snapshots" / "other").mkdir()
        with pytest.raises(CheckpointError, match="holds 2 snapshots and no refs/main"):
            find_checkpoint("Org/Tiny")
        (cache / "blobs" / "0").unlink()  # config.json
        with pytest.raises(CheckpointError, match="there is no target checkpoint at"):
            read_target(cache / "snapshots" / "0123abcd")
        shutil.rmtree(cache / "snapshots")
        (cache / "snapshots").mkdir()
        with pytest.raises(CheckpointError, match="holds no snapshot: the download is incomplete"):
            find_checkpoint("Org/Tiny")


class TestHashes:
    def test_a_shard_is_hashed_once_and_again_when_it_changed(self, broken, tmp_path, monkeypatch):
        from taugate.target import checkpoint

        hashed, real = [], checkpoint.sha256_file

        def counted(path, *progress):
            hashed.append(path.name)
            return real(path, *progress)

        monkeypatch.setattr(checkpoint, "sha256_file", counted)
        memo = tmp_path / "hashes.json"
        first = read_target(broken, memo).weights_sha256
        assert sorted(name for name in hashed if name.startswith("model-")) == [FIRST, SECOND]
        hashed.clear()
        assert read_target(broken, memo).weights_sha256 == first
        assert not [name for name in hashed if name.startswith("model-")], "size and mtime are as they were"
        rewrite(broken, lambda t: t | {KEY: t[KEY] + 1} if KEY in t else t)
        assert read_target(broken, memo).weights_sha256 != first
        for damaged in ("{ damaged", "[1]"):
            memo.write_text(damaged)
            assert read_target(broken, memo).weights_sha256 != first, "a damaged memo is only a memo"

    def test_what_was_hashed_before_an_interruption_is_remembered(self, broken, tmp_path, monkeypatch):
        from taugate.target import checkpoint

        real = checkpoint.sha256_file

        def stopping(path, *progress):
            if path.name == SECOND:
                raise KeyboardInterrupt
            return real(path, *progress)

        memo = tmp_path / "hashes.json"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(checkpoint, "sha256_file", stopping)
            read_target(broken, memo)
        assert [Path(name).name for name in json.loads(memo.read_text())] == [FIRST]

    def test_a_moved_copy_is_the_same_target_and_a_changed_config_is_not(self, broken, tmp_path):
        before = read_target(broken).weights_sha256
        shutil.copytree(broken, tmp_path / "copy")
        assert read_target(tmp_path / "copy").weights_sha256 == before
        config = json.loads((broken / "config.json").read_text())
        config["text_config"]["rms_norm_eps"] = 1e-5
        (broken / "config.json").write_text(json.dumps(config))
        assert read_target(broken).weights_sha256 != before

    def test_progress_is_told_in_bytes(self, broken, monkeypatch):
        import itertools

        from taugate.target import checkpoint

        monkeypatch.setattr(checkpoint.time, "monotonic", itertools.count().__next__)
        events = []
        read_target(broken, progress=events.append)
        total = sum((broken / name).stat().st_size for name in (FIRST, SECOND))
        assert events[-1]["done_bytes"] == events[-1]["of_bytes"] == total
        assert {event["file"] for event in events} == {FIRST, SECOND}


def test_a_checkpoint_that_is_wrong_costs_no_gpu(broken, monkeypatch):
    """The worker checks it before anything asks for CUDA."""
    import torch

    from taugate.target.capture import Capture
    from taugate.target.worker import run

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("CUDA was touched"))
    monkeypatch.setattr(Capture, "from_spec", lambda *_: pytest.fail("the model was loaded"))
    (broken / SECOND).write_bytes((broken / SECOND).read_bytes()[:-7])
    spec = {"model_path": str(broken), "kernel_path": "torch", "dtype": "bfloat16", "device": "cuda", "taps": [1],
            "sequences": [{"key": "k", "token_ids": [1, 2]}]}  # fmt: skip
    with pytest.raises(CheckpointError, match="bytes long but its header needs"):
        list(run(spec, broken.parent / "out"))
