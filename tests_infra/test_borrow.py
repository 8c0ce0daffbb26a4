"""What comes back from the host is taken only if it is what the job says it wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from taugate.drafter.replay import CachedSequence
from taugate.errors import JobError
from taugate.files import sha256_file
from taugate.pipeline.borrow import Borrower
from taugate.pipeline.dataset import Dataset
from taugate.target.checkpoint import TargetInfo
from taugate.target.store import StateIdentity, StateStore

TARGET = TargetInfo("tiny", "qwen3_5_text", 8, 4, 16, (0,), True, "w" * 64, "t" * 64)
IDENTITY = StateIdentity("tiny", "w" * 64, "t" * 64, "float32", "torch", "cpu", {}, "c" * 64)
SEQUENCE = CachedSequence("one", (1, 2, 3), 1, 3)


class Host:
    """A host whose files are a directory here; `tamper` changes them on their way."""

    name = "host"

    def __init__(self, directory: Path, tamper: bool) -> None:
        self.directory, self.tamper = directory, tamper
        self.transport = self

    def get(self, remote: str, local: Path) -> str:
        data = (self.directory / Path(remote).name).read_bytes()
        local.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if self.tamper else data)
        return sha256_file(local)


@pytest.mark.parametrize("tamper", [False, True])
def test_a_state_that_changed_on_its_way_is_refused(tmp_path, tamper):
    there, scratch = tmp_path / "there", tmp_path / "scratch"
    there.mkdir()
    scratch.mkdir()
    key = IDENTITY.key(SEQUENCE.token_ids)
    save_file({"final_hidden": torch.ones(3, 4).bfloat16()}, there / f"{key}.safetensors")
    done = {"files": {key: sha256_file(there / f"{key}.safetensors")}, "kernels": {}, "device": "cpu"}
    data = Dataset(TARGET, (SEQUENCE,), IDENTITY, StateStore(tmp_path, "tiny"), tmp_path / "head")
    survey = SimpleNamespace(host=Host(there, tamper), config=None, say=lambda text: None)
    borrower = Borrower(survey, data, lambda record: None)
    if tamper:
        with pytest.raises(JobError, match="'one' changed on its way from host"):
            borrower._fetch_states([SEQUENCE], done, "out", scratch, "id")
        assert data.store.names(key) == set(), "nothing of it was kept"
    else:
        borrower._fetch_states([SEQUENCE], done, "out", scratch, "id")
        assert data.store.names(key) == {"final_hidden"}
