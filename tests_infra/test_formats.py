"""Other tools' caches: what they hold arrives under the right name, and what they do not say is asked for."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from taugate.errors import StoreError
from taugate.pipeline.imported import imported_dataset
from taugate.target.checkpoint import read_target
from taugate.target.formats import Facts, identity, import_files, main
from taugate.target.store import StateStore
from taugate.target.worker import run
from tests_infra import checkpoints

IDS = list(range(3, 40))
LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    checkpoints.write_checkpoint(directory, "qwen3_5")
    return directory


@pytest.fixture(scope="module")
def states(model, tmp_path_factory):
    """All taps and final_hidden of IDS as our own capture takes them, in bfloat16."""
    from safetensors.torch import load_file

    out = tmp_path_factory.mktemp("captured")
    spec = {"model_path": str(model), "kernel_path": "torch", "dtype": "bfloat16", "device": "cpu", "threads": 1,
            "taps": list(range(LAYERS)), "sequences": [{"key": "k", "token_ids": IDS}]}  # fmt: skip
    list(run(spec, out))
    return load_file(out / "k.safetensors")


@pytest.fixture
def speculators(states, tmp_path):
    """hs_0.safetensors of the layers with vLLM's ids 1 and 3, and the last one before the norm."""
    hidden = torch.stack([states["tap.0"], states["tap.2"], states["tap.3"]], dim=1)
    save_file({"token_ids": torch.tensor(IDS), "hidden_states": hidden.contiguous()}, tmp_path / "hs_0.safetensors")
    return tmp_path / "hs_0.safetensors"


@pytest.fixture
def specforge(states, tmp_path):
    """data_0.ckpt.gz of the layers 0 and 2 with the last hidden state after the norm; five tokens of prompt."""
    mask = torch.tensor([[0] * 5 + [1] * (len(IDS) - 5)])
    return write_specforge(tmp_path / "data_0.ckpt.gz", states, {"loss_mask": mask})


def write_specforge(file, states, changes, drop=()):
    data = {"input_ids": torch.tensor([IDS]), "loss_mask": torch.ones(1, len(IDS), dtype=torch.long),
            "hidden_states": torch.cat([states["tap.0"], states["tap.2"]], dim=-1)[None],
            "target_last_hidden_states": states["final_hidden"][None]} | changes  # fmt: skip
    buffer = io.BytesIO()
    torch.save({key: value for key, value in data.items() if key not in drop}, buffer)
    file.write_bytes(gzip.compress(buffer.getvalue()) if file.suffix == ".gz" else buffer.getvalue())
    return file


def facts(model, layers, **changes):
    given = {"model": str(model), "layer_ids": layers, "dtype": "bfloat16", "engine": "vllm", "version": "0.11.0",
             "gpu": "NVIDIA H100", "last_slice": True}  # fmt: skip
    return Facts(**given | changes)


def imported(format, file, given, root):
    """The done event, and what the store then holds for IDS."""
    done = list(import_files(format, [file], given, root))[-1]
    target = read_target(Path(given.model))
    store, key = StateStore(root, target.name), identity(format, given, target).key(IDS)
    return done, store.load(key, store.names(key))


def test_speculators_ids_count_from_the_embedding_and_the_norm_is_applied(speculators, model, states, tmp_path):
    """What speculators cached is bit for bit what we would have captured, final_hidden included."""
    _, there = imported("speculators", speculators, facts(model, (1, 3)), tmp_path / "store")
    assert there.keys() == {"tap.0", "tap.2", "tap.3", "final_hidden"}
    for name, value in there.items():
        assert torch.equal(value, states[name]), name


def test_specforge_ids_count_layers_and_its_last_state_is_normed(specforge, model, states, tmp_path):
    done, there = imported("specforge", specforge, facts(model, (0, 2), engine="sglang"), tmp_path / "store")
    assert there.keys() == {"tap.0", "tap.2", "final_hidden"}
    for name, value in there.items():
        assert torch.equal(value, states[name]), name
    manifest = json.loads(Path(done["manifest"]).read_text())
    assert manifest["entries"][0]["prompt_length"] == 5, "the prompt ends where the loss begins"


def test_an_import_is_a_data_set_to_replay(specforge, speculators, model, states, tmp_path):
    root = tmp_path / "store"
    done, _ = imported("specforge", specforge, facts(model, (0, 2), engine="sglang"), root)
    data = imported_dataset(Path(done["manifest"]), root)
    (sequence,) = data.sequences
    assert (sequence.token_ids, sequence.prompt_length, sequence.cap) == (tuple(IDS), 5, len(IDS))
    assert torch.equal(data.states(sequence, ["tap.2"])["tap.2"], states["tap.2"])
    assert data.head("bfloat16").head.shape == (64, 32)
    done, _ = imported("speculators", speculators, facts(model, (1, 3)), root)
    with pytest.raises(StoreError, match="1 sequences whose prompt_length is not known, the first is hs_0.safetensors"):
        imported_dataset(Path(done["manifest"]), root)
    Path(done["manifest"]).write_text("{}")
    with pytest.raises(StoreError, match="is no manifest of an import"):
        imported_dataset(Path(done["manifest"]), root)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_final_norm_is_that_of_the_family(family, tmp_path):
    """Qwen3 and Llama multiply by w, Qwen3.5 by 1 + w: a norm of ones would not tell them apart."""
    from taugate.target.finalnorm import FinalNorm

    model = checkpoints.text_model(family)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.3, 1.7, 32))
    checkpoints.write_checkpoint(tmp_path, family, model)
    raw = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        assert torch.equal(FinalNorm(tmp_path)(raw), model.model.norm(raw))


def test_imported_states_are_never_taken_for_captured_ones(model):
    target = read_target(model)
    changed = ({}, {"engine": "sglang"}, {"version": "1"}, {"gpu": "A100"}, {"dtype": "float16"})
    given = [(format, facts(model, (1,), **c)) for format in ("speculators", "specforge") for c in changed]
    assert len({identity(format, one, target).key(IDS) for format, one in given}) == 10


def test_every_missing_fact_is_named_in_one_sentence(speculators, tmp_path, capsys):
    assert main(["speculators", str(speculators), "--store", str(tmp_path), "--dtype", "bfloat16"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for option in ("--model", "--layer-ids", "--engine", "--version", "--gpu", "--last-slice"):
        assert option in said
    assert "--dtype" not in said
    assert main(["specforge", str(speculators), "--store", str(tmp_path)]) == 1
    assert "--last-slice" not in capsys.readouterr().err, "SpecForge says it by the key's name"


class TestRefused:
    def sentence(self, format, file, given, tmp_path):
        with pytest.raises(StoreError) as caught:
            list(import_files(format, [file], given, tmp_path / "store"))
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    def test_another_number_of_slices(self, speculators, model, tmp_path):
        said = self.sentence("speculators", speculators, facts(model, (1, 3), last_slice=False), tmp_path)
        assert "hidden_states has shape [37, 3, 32], but 2 layer ids make [S, 2, 32]" in said
        said = self.sentence("speculators", speculators, facts(model, (1, 2, 3)), tmp_path)
        assert "3 layer ids and the last slice make [S, 4, 32]" in said

    def test_ids_in_the_other_tools_convention(self, speculators, model, tmp_path):
        """0 is the embedding in vLLM: somebody gave layers counted from 0."""
        said = self.sentence("speculators", speculators, facts(model, (0, 2)), tmp_path)
        assert "layer ids [0, 2] are not different ids of the target's layers 1…4" in said

    def test_another_width(self, specforge, model, tmp_path):
        said = self.sentence("specforge", specforge, facts(model, (0, 1, 2)), tmp_path)
        assert "hidden_states is 64 wide, but 3 layer ids of width 32 make 96" in said

    def test_tokens_outside_the_vocabulary(self, states, model, tmp_path):
        file = write_specforge(tmp_path / "d.ckpt", states, {"input_ids": torch.tensor([[*IDS[:-1], 64]])})
        assert "holds token 64; the vocabulary of" in self.sentence("specforge", file, facts(model, (0, 2)), tmp_path)

    def test_states_that_are_not_finite(self, states, model, tmp_path):
        hidden = torch.cat([states["tap.0"], states["tap.2"] * float("nan")], dim=-1)[None]
        file = write_specforge(tmp_path / "d.ckpt", states, {"hidden_states": hidden})
        assert "tap.2 is not finite" in self.sentence("specforge", file, facts(model, (0, 2)), tmp_path)

    def test_a_missing_key(self, states, model, tmp_path):
        file = write_specforge(tmp_path / "d.ckpt", states, {}, drop=("loss_mask",))
        assert "lacks loss_mask" in self.sentence("specforge", file, facts(model, (0, 2)), tmp_path)
        save_file({"token_ids": torch.tensor(IDS)}, tmp_path / "hs_1.safetensors")
        said = self.sentence("speculators", tmp_path / "hs_1.safetensors", facts(model, (1, 3)), tmp_path)
        assert "lacks hidden_states" in said

    def test_an_eagle3_cache(self, states, model, tmp_path):
        file = write_specforge(tmp_path / "d.ckpt", states, {"aux_hidden_state": torch.zeros(1)})
        assert "is an EAGLE3 cache" in self.sentence("specforge", file, facts(model, (0, 2)), tmp_path)

    def test_a_pickle_that_would_run_code(self, model, tmp_path):
        class Evil:
            def __reduce__(self):
                return (open, (str(tmp_path / "was here"), "w"))

        torch.save({"input_ids": Evil()}, tmp_path / "data_1.ckpt")
        (tmp_path / "data_2.ckpt").write_bytes(pickle.dumps({"input_ids": Evil()}, protocol=2))
        for name in ("data_1.ckpt", "data_2.ckpt"):
            said = self.sentence("specforge", tmp_path / name, facts(model, (0, 2)), tmp_path)
            assert "holds more than tensors and is not loaded" in said
        assert not (tmp_path / "was here").exists()

    @pytest.mark.parametrize("cut", [0, 3, 200])
    def test_files_that_are_cut(self, specforge, speculators, model, tmp_path, cut):
        plain = tmp_path / "data_1.ckpt"
        plain.write_bytes(gzip.decompress(specforge.read_bytes()))
        for file, format in ((specforge, "specforge"), (plain, "specforge"), (speculators, "speculators")):
            file.write_bytes(file.read_bytes()[:cut])
            layers = (0, 2) if format == "specforge" else (1, 3)
            said = self.sentence(format, file, facts(model, layers), tmp_path)
            known = ("is cut, or not what", "is not a readable safetensors file", "bytes long but its header needs")
            assert any(words in said for words in known)

    def test_files_that_are_not_there(self, model, tmp_path):
        for name, format in (("data_0.ckpt", "specforge"), ("hs_0.safetensors", "speculators")):
            said = self.sentence(format, tmp_path / name, facts(model, (1, 2)), tmp_path)
            assert said == f"{tmp_path / name} cannot be read (No such file or directory); fetch it again"

    def test_states_without_positions(self, states, model, tmp_path):
        for shape in ((), (64,)):
            file = write_specforge(tmp_path / "d.ckpt", states, {"hidden_states": torch.zeros(shape)})
            said = self.sentence("specforge", file, facts(model, (0, 2)), tmp_path)
            assert f"hidden_states has shape {list(shape)}, not [1, S, width]" in said

    def test_tokens_that_are_no_whole_numbers(self, speculators, model, tmp_path):
        hidden = torch.zeros(2, 3, 32).bfloat16()
        save_file({"token_ids": torch.tensor([1.0, 2.5]), "hidden_states": hidden}, speculators)
        said = self.sentence("speculators", speculators, facts(model, (1, 3)), tmp_path)
        assert "holds tokens that are no whole numbers" in said
