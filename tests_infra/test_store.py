"""The state store: what was stored comes back or an error names the file; an interruption leaves old or new."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from taugate.errors import StoreError
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


@pytest.mark.parametrize("at", range(6))
def test_an_interruption_leaves_the_old_entry_or_the_new_one(store, tmp_path, monkeypatch, at):
    """Stop at the n-th rename or fsync of a second adopt: every tap that is listed must load."""
    adopt(store, tmp_path, ["tap.1"], value=1.0)
    calls = 0

    def stopping(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > at:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopping(os.replace))
        patch.setattr(os, "fsync", stopping(os.fsync))
        try:
            adopt(store, tmp_path, ["tap.2"], value=2.0)
            finished = True
        except KeyboardInterrupt:
            finished = False
    key = IDENTITY.key(IDS)
    names = store.names(key)
    assert "tap.1" in names and (store.load(key, names)["tap.1"] == 1).all()
    assert not finished or "tap.2" in names
    adopt(store, tmp_path, ["tap.2"], value=2.0)
    assert (store.load(key, ["tap.2"])["tap.2"] == 2).all(), "after an interruption the next run goes on"
