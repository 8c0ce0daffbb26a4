"""What must hold whatever the numbers are: how a sequence is cut, padded or arranged does not change what is computed.

Each property is checked against the float64 reference's own answer, on the fallback often and on fla's kernels a few
times, since those are interpreted here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

numerics = pytest.mark.numerics
QUICK = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)  # fmt: skip
FEW = settings(QUICK, max_examples=3, phases=(Phase.explicit, Phase.generate))
PLENTY = {"torch": QUICK, "fla": FEW}
TOLERANCE = 2e-5  # float32 sums of up to 130 tokens in any order; each property's violation is of order 1


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@st.composite
def problems(draw, most=90, **fixed):
    """A case with sizes and regime of Hypothesis' choice, and its inputs in float32."""
    from taugate.numerics.cases import Case

    sizes = {
        "tokens": draw(st.integers(2, most)),
        "regime": draw(st.sampled_from(("init", "long", "none", "correlated", "small"))),
        "key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 8,
        "initial_state": draw(st.booleans()),
    }  # fmt: skip
    return Case("drawn", **(sizes | fixed)).inputs("fp32", draw(st.integers(0, 2**16)))


def near(got, want):
    """Relative distance, where two zeros are equal."""
    scale = float(want.double().norm())
    return float((got.double() - want.double()).norm()) <= TOLERANCE * max(scale, 1e-30)


@pytest.fixture(params=["torch", "fla"])
def check(request, kernels):
    """check(property): run it for one family, where property(run, data) draws its inputs; run calls the chunk path."""
    family = request.param

    def run(inputs):
        out, state = kernels.run(f"{family}-chunk", inputs.to(kernels.device), "fp32")
        return out.cpu(), state.cpu()

    def checked(holds):
        @PLENTY[family]
        @given(data=st.data())
        def drawn(data):
            holds(run, data)

        drawn()

    return checked


@numerics(level="properties")
def test_chunk_size_does_not_matter(check, evidence):
    def holds(run, data):
        inputs = data.draw(problems())
        size = data.draw(st.sampled_from((16, 32)))
        out, state = run(inputs)
        other, other_state = run(replace(inputs, chunk_size=size))
        assert near(other, out) and near(other_state, state)

    check(holds)
    evidence.add({"type": "agreement", "level": "properties", "what": "chunk size 16, 32 or 64 gives the same"})


@numerics(level="properties")
def test_a_sequence_in_two_parts_is_the_whole(check):
    from taugate.numerics.cases import part

    def holds(run, data):
        import torch

        inputs = data.draw(problems())
        at = data.draw(st.integers(1, inputs.q.shape[1] - 1))
        out, state = run(inputs)
        first, between = run(part(inputs, None, at, inputs.initial_state))
        second, last = run(part(inputs, at, None, between))
        assert near(torch.cat([first, second], dim=1), out) and near(last, state)

    check(holds)


@numerics(level="properties")
def test_without_beta_nothing_is_written(check):
    """beta = 0: the state only decays, and outputs read what was there."""

    def holds(run, data):
        import torch

        inputs = data.draw(problems(initial_state=True))
        inputs = replace(inputs, beta=torch.zeros_like(inputs.beta))
        out, state = run(inputs)
        decayed = inputs.initial_state * inputs.g.sum(1).exp()[..., None, None]
        assert near(state, decayed)
        empty, _ = run(replace(inputs, initial_state=None))
        assert not empty.any() and out.any()

    check(holds)


@numerics(level="properties")
def test_without_decay_and_with_one_key_the_last_value_is_read_back(check):
    """g = 0, beta = 1: the delta rule overwrites. With the same key throughout, q = k reads the newest value only."""

    def holds(run, data):
        import torch

        inputs = data.draw(problems(regime="init", initial_state=False))
        k = inputs.k[:, :1].expand_as(inputs.k).contiguous()
        changed = replace(inputs, q=k, k=k, g=torch.zeros_like(inputs.g), beta=torch.ones_like(inputs.beta))
        out, _ = run(changed)
        assert near(out, inputs.v * inputs.q.shape[-1] ** -0.5)

    check(holds)


@numerics(level="properties")
def test_heads_do_not_see_each_other(check):
    def holds(run, data):
        import torch

        inputs = data.draw(problems(most=70, key_heads=2, value_heads=2))
        out, state = run(inputs)
        swapped = {name: getattr(inputs, name).flip(2).contiguous() for name in ("q", "k", "v", "g", "beta")}
        begin = None if inputs.initial_state is None else inputs.initial_state.flip(1).contiguous()
        other, other_state = run(replace(inputs, initial_state=begin, **swapped))
        assert torch.equal(other.flip(2), out) and torch.equal(other_state.flip(1), state)
        other = {name: getattr(inputs, name) for name in "qkv"}
        mixed = {name: torch.cat([x[:, :, :1], -0.5 * x[:, :, 1:]], dim=2) for name, x in other.items()}
        assert torch.equal(run(replace(inputs, **mixed))[0][:, :, 0], out[:, :, 0])

    check(holds)


@numerics(level="properties")
def test_masked_pads_before_a_sequence_change_nothing(check):
    from taugate.numerics.cases import pad

    def holds(run, data):
        inputs = data.draw(problems(initial_state=False))
        before, after = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 40))
        out, state = run(inputs)
        padded, _ = run(pad(inputs, before, after))
        _, padded_state = run(pad(inputs, before, 0))
        assert near(padded[:, before : before + inputs.q.shape[1]], out) and near(padded_state, state)

    check(holds)
