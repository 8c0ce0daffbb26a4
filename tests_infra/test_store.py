"""The state store: what was stored comes back or an error names the file; an interruption leaves old or new."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from taugate.errors import StoreError
from taugate.target.prune import entries, main, prune
from taugate.target.store import StateIdentity, StateStore

IDENTITY = StateIdentity("tiny", "w" * 64, "t" * 64, "float32", "torch", "cpu", {"torch": "2.13.0"}, "c" * 64)
IDS = [3, 1, 4, 1, 5]


@pytest.fixture
def store(tmp_path):
    return StateStore(tmp_path, "models/tiny pair")


def adopt(store, tmp_path, names, value=1.0, ids=IDS):
    file = tmp_path / "made.safetensors"
    save_file({name: torch.full((len(ids), 4), value).bfloat16() for name in names}, file)
    store.adopt(IDENTITY.key(ids), file, IDENTITY.fields(ids), {"host": "test"})


def test_what_was_stored_comes_back(store, tmp_path):
    adopt(store, tmp_path, ["tap.1", "final_hidden"], value=2.5)
    states = store.load(IDENTITY.key(IDS), ["tap.1"])
    assert states.keys() == {"tap.1"}
    assert states["tap.1"].dtype == torch.bfloat16 and (states["tap.1"] == 2.5).all()


def test_a_second_drafter_adds_its_taps_and_keeps_the_first_ones(store, tmp_path):
    key = IDENTITY.key(IDS)
    adopt(store, tmp_path, ["tap.1"], value=1.0)
    adopt(store, tmp_path, ["tap.1", "tap.2"], value=2.0)
    states = store.load(key, ["tap.1", "tap.2"])
    assert (states["tap.1"] == 1).all(), "a stored tap is never replaced"
    assert (states["tap.2"] == 2).all()
    assert store.missing(key, ["tap.1", "tap.2", "tap.3"]) == ["tap.3"]
    assert len(list(store.directory(key).glob("*.safetensors"))) == 1, "the old file is gone"


def test_missing_state_names_the_key_and_the_command(store):
    with pytest.raises(StoreError, match=r"lacks tap\.1 for key .*pytest -m gpu_window"):
        store.load(IDENTITY.key(IDS), ["tap.1"])


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap meta", "cut meta"])
def test_damage_is_an_error_that_names_the_file(store, tmp_path, damage):
    adopt(store, tmp_path, ["tap.1"])
    directory = store.directory(IDENTITY.key(IDS))
    states, meta = directory / "states.safetensors", directory / "meta.json"
    data = states.read_bytes()
    if damage == "flip":
        states.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncate":
        states.write_bytes(data[:-3])
    elif damage == "remove":
        states.unlink()
    elif damage == "swap meta":
        other = json.loads(meta.read_text())
        other["fields"]["token_ids"] = [9, 9]
        meta.write_text(json.dumps(other))
    else:
        meta.write_text(meta.read_text()[:40])
    with pytest.raises(StoreError, match=str(directory)):
        store.load(IDENTITY.key(IDS), ["tap.1"])


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_what_is_plainly_damaged_is_not_taken_for_stored(store, tmp_path, damage):
    """Whoever asks what is missing must not be told "nothing": the entry would be found damaged at the replay."""
    adopt(store, tmp_path, ["tap.1"])
    key = IDENTITY.key(IDS)
    states = store.directory(key) / "states.safetensors"
    states.write_bytes(states.read_bytes()[:-3]) if damage == "truncate" else states.unlink()
    with pytest.raises(StoreError, match=f"{states} (does not have the size|is missing)"):
        store.missing(key, ["tap.1"])


@pytest.mark.parametrize("name", ["file", "sha256", "bytes", "tensors", "generation", "provenance"])
def test_a_meta_json_that_lacks_something_is_damaged(store, tmp_path, name):
    adopt(store, tmp_path, ["tap.1"])
    meta = store.directory(IDENTITY.key(IDS)) / "meta.json"
    meta.write_text(json.dumps({key: value for key, value in json.loads(meta.read_text()).items() if key != name}))
    for ask in (store.names, lambda key: store.load(key, ["tap.1"])):
        with pytest.raises(StoreError, match=f"{meta} lacks a usable {name}; delete its directory"):
            ask(IDENTITY.key(IDS))


def test_a_tensor_that_only_meta_json_names_is_damage(store, tmp_path):
    adopt(store, tmp_path, ["tap.1"])
    meta = store.directory(IDENTITY.key(IDS)) / "meta.json"
    told = json.loads(meta.read_text())
    meta.write_text(json.dumps(told | {"tensors": told["tensors"] | {"tap.5": {}}}))
    with pytest.raises(StoreError, match=r"meta\.json names tap\.5, which states\.safetensors lacks"):
        store.load(IDENTITY.key(IDS), ["tap.1", "tap.5"])


@settings(max_examples=40, deadline=None)
@given(
    field=st.sampled_from(
        ["weights_sha256", "tokenizer_sha256", "dtype", "kernel_path", "device", "capture_code_sha256"]
    )
)
def test_everything_that_decides_the_numbers_is_in_the_key(field):
    from dataclasses import replace

    assert replace(IDENTITY, **{field: "other"}).key(IDS) != IDENTITY.key(IDS)
    assert replace(IDENTITY, versions={"torch": "2.14.0"}).key(IDS) != IDENTITY.key(IDS)
    assert replace(IDENTITY, target="renamed").key(IDS) == IDENTITY.key(IDS), "a name is not identity"


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 4095), min_size=1, max_size=20),
    other=st.lists(st.integers(0, 4095), min_size=1, max_size=20),
)
def test_different_tokens_have_different_keys(ids, other):
    assert (IDENTITY.key(ids) == IDENTITY.key(other)) == (ids == other)


class Killed(BaseException):
    """What a process cannot catch."""


class Killer:
    """Every call that changes the disk counts; at the n-th the process is dead: half a copy, nothing after it."""

    CALLS = ((os, "replace"), (os, "rename"), (os, "fsync"), (os, "unlink"), (shutil, "rmtree"), (shutil, "copyfile"),
             (tempfile, "mkdtemp"), (tempfile, "mkstemp"), (safetensors.torch, "save_file"))  # fmt: skip

    def __init__(self, patch, after):
        self.left = after
        for module, name in self.CALLS:
            patch.setattr(module, name, self.counted(getattr(module, name), name))

    def counted(self, real, name):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left >= 0:
                return real(*args, **kwargs)
            if self.left == -1 and name in ("copyfile", "save_file"):
                real(*args, **kwargs)
                os.truncate(args[1], os.path.getsize(args[1]) // 2)
            raise Killed

        return call


@settings(max_examples=120, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sets(st.sampled_from(["tap.1", "tap.2", "final_hidden"]), min_size=1), st.integers(0, 14)),
        min_size=1,
        max_size=5,
    )
)
def test_whenever_it_is_killed_the_old_entry_or_the_new_one_is_there(steps):
    """Any sequence of writers of one entry, each killed at any change to the disk, or not at all."""
    key = IDENTITY.key(IDS)
    with tempfile.TemporaryDirectory() as root:
        stored = {}
        for value, (names, after) in enumerate(steps, 1):
            store = StateStore(Path(root), "tiny")
            file = Path(root) / "made.safetensors"
            save_file({name: torch.full((len(IDS), 4), float(value)).bfloat16() for name in names}, file)
            new = {name: value for name in names} | stored
            with pytest.MonkeyPatch.context() as patch:
                Killer(patch, after)
                try:
                    store.adopt(key, file, IDENTITY.fields(IDS), {"writer": value})
                    finished = True
                except Killed:
                    finished = False
            after_it = StateStore(Path(root), "tiny")
            names = after_it.names(key)
            states = after_it.load(key, names)
            found = {name: int(states[name].float().mean()) for name in names}
            assert found == new or (not finished and found == stored)
            assert all((states[name] == found[name]).all() for name in names)
            assert list(after_it.stored_keys()) == ([key] if found else []), "nothing half made is taken for an entry"
            stored = found


@pytest.mark.parametrize("at", ["copyfile", "save_file"])
def test_a_full_disk_is_one_sentence_and_the_old_entry_stays(store, tmp_path, monkeypatch, at):
    if at == "save_file":
        adopt(store, tmp_path, ["tap.1"])
    full = OSError(28, "No space left on device")
    if at == "save_file":  # the words of safetensors' own error
        text = "Error while serializing: I/O error: No space left on device (os error 28)"
        full = safetensors.SafetensorError(text)
    save_file({"tap.2": torch.zeros(5, 4).bfloat16()}, tmp_path / "new.safetensors")

    def fails(*_):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(shutil if at == "copyfile" else safetensors.torch, at, fails)
        with pytest.raises(StoreError, match=f"the disk of {store.root} is full: make room there.* prune"):
            store.adopt(IDENTITY.key(IDS), tmp_path / "new.safetensors", IDENTITY.fields(IDS), {})
    assert store.names(IDENTITY.key(IDS)) == ({"tap.1"} if at == "save_file" else set())


def test_a_reader_follows_an_entry_that_grows_under_it(store, tmp_path, monkeypatch):
    """meta.json is read, then a writer adds a tap and removes the old file: the reader must not call that damage."""
    adopt(store, tmp_path, ["tap.1"])
    key, real = IDENTITY.key(IDS), StateStore.meta
    waiting = [None]

    def meta(self, asked):
        told = real(self, asked)
        if waiting:
            waiting.clear()
            adopt(StateStore(tmp_path, "models/tiny pair"), tmp_path, ["tap.2"], value=2.0)
        return told

    monkeypatch.setattr(StateStore, "meta", meta)
    assert (store.load(key, ["tap.1"])["tap.1"] == 1).all()
    assert not waiting


def test_two_processes_that_add_to_one_entry_lose_nothing(tmp_path):
    """Without a lock for writers, both would write states-1.safetensors, and one meta.json would name the other's."""
    stores = [StateStore(tmp_path, "tiny") for _ in range(8)]
    files = [tmp_path / f"{number}.safetensors" for number in range(8)]
    for number, file in enumerate(files):
        save_file({f"tap.{number}": torch.full((5, 4), float(number)).bfloat16()}, file)
    key = IDENTITY.key(IDS)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda store, file: store.adopt(key, file, IDENTITY.fields(IDS), {}), stores, files))
    states = StateStore(tmp_path, "tiny").load(key, [f"tap.{number}" for number in range(8)])
    assert all((states[f"tap.{number}"] == number).all() for number in range(8))


class TestPrune:
    @pytest.fixture
    def filled(self, tmp_path):
        """Four entries of a target, last used 40, 30, 20 and 10 days ago; returns root, their keys and one's bytes."""
        store = StateStore(tmp_path, "tiny")
        lists = [[number] * 50 for number in range(4)]
        for days, ids in zip((40, 30, 20, 10), lists, strict=True):
            adopt(store, tmp_path, ["tap.1"], ids=ids)
            then = time.time() - days * 86400
            os.utime(store.directory(IDENTITY.key(ids)) / "meta.json", (then, then))
        keys = [IDENTITY.key(ids) for ids in lists]
        del store
        return tmp_path, keys, entries(tmp_path / "states" / "tiny")[0].bytes

    def left(self, root):
        return set(StateStore(root, "tiny").stored_keys())

    def test_by_age_and_by_size_the_least_recently_used_go_first(self, filled):
        root, keys, size = filled
        (told,) = prune(root, older_than_s=35 * 86400, dry_run=True)
        assert (told.pruned_entries, told.pruned_bytes) == (1, size) and self.left(root) == set(keys)
        prune(root, older_than_s=35 * 86400)
        assert self.left(root) == set(keys[1:])
        prune(root, max_bytes=int(2.1 * size))
        assert self.left(root) == set(keys[2:])
        assert not [path for path in root.rglob("*") if path.name.startswith(".gone")]

    def test_reading_counts_as_use(self, filled):
        root, keys, _ = filled
        StateStore(root, "tiny").load(keys[0], ["tap.1"])
        prune(root, older_than_s=15 * 86400)
        assert self.left(root) == {keys[0], keys[3]}

    def test_what_a_process_works_with_is_left_alone(self, filled):
        root, keys, _ = filled
        other = "import sys; from pathlib import Path; from taugate.target.store import StateStore; "
        other += "s = StateStore(Path(sys.argv[1]), 'tiny'); s.names(sys.argv[2]); print('reading', flush=True)\n"
        other += "input()"
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        with subprocess.Popen([sys.executable, "-c", other, str(root), keys[0]], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, env=env) as reader:  # fmt: skip
            assert reader.stdout.readline() == "reading\n"
            (told,) = prune(root, max_bytes=0)
            assert told.in_use and told.pruned_entries == 0 and len(entries(root / "states" / "tiny")) == 4
            reader.communicate("\n")
        assert prune(root, max_bytes=0)[0].pruned_entries == 4

    def test_the_commands_print_totals(self, filled, capsys):
        root, _, size = filled
        assert main(["size", "--store", str(root)]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["bytes"] == 4 * size
        assert main(["prune", "--store", str(root), "--older-than", "25d", "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert "would remove 2 of 4 states" in out and json.loads(out.splitlines()[-1])["pruned_bytes"] == 2 * size
        assert main(["prune", "--store", str(root / "elsewhere"), "--max-size", "1G"]) == 1
        assert capsys.readouterr().err.count("\n") == 1

    @pytest.mark.parametrize("args", [["--older-than", "soon"], ["--older-than=-3d"], ["--max-size", "5X"], []])
    def test_a_bad_age_or_size_is_one_sentence(self, filled, capsys, args):
        with pytest.raises(SystemExit) as ended:
            main(["prune", "--store", str(filled[0]), *args])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.count("\n") == 1
        assert (args[-1].rpartition("=")[2] if args else "prune needs --older-than") in said
        assert len(self.left(filled[0])) == 4
