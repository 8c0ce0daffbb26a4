"""Captured states on their way to the host: what arrives is one's own, bfloat16 and finite, or an error names it."""

from __future__ import annotations

import shutil

import pytest

from taugate.errors import CheckpointError

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="this machine has no GPU"),
    pytest.mark.filterwarnings("ignore"),  # those of torch about the machine at hand
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request):
    return request.param


@pytest.fixture
def outbox(device):
    from taugate.target.outbox import Outbox

    return Outbox(device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_come_back_rounded_and_in_memory_of_their_own(outbox, device, dtype):
    """A layer's output is overwritten by the next layer, and a slice of a wider tensor must not keep that alive."""
    import torch

    wide = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)).to(device, getattr(torch, dtype))
    state = wide[:, :, :6]
    expected = state[0].to(torch.bfloat16, copy=True).cpu()
    outbox.put(0, "tap.1", state)
    outbox.put(0, "final_hidden", state)
    outbox.put(1, "tap.1", 2 * state)
    there = outbox.take(0)
    wide.zero_()
    assert there.keys() == {"tap.1", "final_hidden"}
    for found in there.values():
        assert found.device.type == "cpu" and found.dtype == torch.bfloat16
        assert found.shape == (5, 6) and found.is_contiguous()
        assert torch.equal(found, expected)
        assert found.untyped_storage().nbytes() == 5 * 6 * 2
    there["tap.1"].zero_()
    assert torch.equal(there["final_hidden"], expected)
    assert torch.equal(outbox.take(1)["tap.1"], 2 * expected)


def test_more_states_than_may_be_under_way_all_arrive(outbox, device):
    """Of lengths that differ, so that the memory in between is used again for a shorter state."""
    import torch

    states = [torch.randn(1, 1 + 37 * n % 50, 16, generator=torch.Generator().manual_seed(n)) for n in range(40)]
    for index, state in enumerate(states):
        outbox.put(index, "tap.1", state.to(device))
    for index, state in enumerate(states):
        assert torch.equal(outbox.take(index)["tap.1"], state[0].bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_that_is_not_finite_is_named_and_not_kept(outbox, device, value, dtype):
    import torch

    state = torch.randn(1, 5, 6).to(device, getattr(torch, dtype))
    outbox.put(0, "tap.1", state.clone())
    state[0, 3, 2] = value
    with pytest.raises(CheckpointError, match=r"^tap\.7 of a sequence of 5 tokens is not finite; nothing was kept$"):
        outbox.put(0, "tap.7", state)
        outbox.take(0)  # on a GPU it is seen here


def test_a_pass_that_was_given_up_leaves_nothing(outbox, device):
    """The next pass has the same sequences, and would else return states of the last one."""
    import torch

    outbox.put(0, "tap.1", torch.zeros(1, 5, 6, device=device))
    outbox.clear()
    outbox.put(0, "tap.2", torch.ones(1, 5, 6, device=device))
    assert outbox.take(0).keys() == {"tap.2"}
