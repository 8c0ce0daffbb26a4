"""The public implementation, for the tests that compare with it."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="session")
def public():
    """`dflash.model`, with the timer that needs a GPU replaced by one that does not."""
    try:
        module = importlib.import_module("dflash.model")
    except ImportError as error:
        pytest.fail(f"run make parity: the public package dflash 0.1.0 cannot be imported ({error})", pytrace=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_cuda_time", lambda: 0.0)
        yield module
