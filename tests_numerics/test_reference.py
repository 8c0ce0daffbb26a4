"""Is the reference right, and is it float64 all the way? Judged by 40-digit arithmetic and by a second formulation."""

from __future__ import annotations

import pytest

numerics = pytest.mark.numerics
EXACT = 1e-14


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


def tiny(**changes):
    from taugate.numerics.cases import Case

    sizes = {"tokens": 5, "regime": "init", "key_heads": 1, "value_heads": 2, "key_dim": 3, "value_dim": 2}
    return Case("tiny", **(sizes | {"initial_state": True} | changes))


def with_mpmath(inputs, scale):
    """The recurrence in 40 digits, written with scalars only. Output and state as nested lists of floats."""
    from mpmath import exp, mp, mpf, sqrt

    mp.dps = 40
    tokens, heads = inputs.v.shape[1:3]
    group = heads // inputs.q.shape[2]
    outs = [[None] * heads for _ in range(tokens)]
    states = []
    for h in range(heads):
        s = [[mpf(float(x)) for x in row] for row in inputs.initial_state[0, h]]
        for t in range(tokens):
            q, k = ([mpf(float(x)) for x in y[0, t, h // group]] for y in (inputs.q, inputs.k))
            q, k = ([x / sqrt(sum(y * y for y in z) + mpf("1e-6")) for x in z] for z in (q, k))
            decay, beta = exp(mpf(float(inputs.g[0, t, h]))), mpf(float(inputs.beta[0, t, h]))
            s = [[decay * x for x in row] for row in s]
            for j in range(len(s[0])):
                delta = beta * (mpf(float(inputs.v[0, t, h, j])) - sum(s[i][j] * k[i] for i in range(len(k))))
                for i in range(len(k)):
                    s[i][j] += k[i] * delta
            outs[t][h] = [float(scale * sum(s[i][j] * q[i] for i in range(len(q)))) for j in range(len(s[0]))]
        states.append([[float(x) for x in row] for row in s])
    return [outs], [states]


@numerics(level="reference")
@pytest.mark.parametrize("regime", ["init", "strong", "small"])
def test_the_recurrence_agrees_with_40_digits(regime, evidence):
    import torch

    from taugate.numerics.measures import relative_error
    from taugate.numerics.reference import gated_delta_rule

    inputs = tiny(regime=regime).inputs("fp32", seed=1)
    out, state = gated_delta_rule(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial_state=inputs.initial_state
    )
    assert out.dtype == state.dtype == torch.float64
    want_out, want_state = with_mpmath(inputs, 3**-0.5)
    errors = [
        relative_error(got, torch.tensor(want, dtype=torch.float64))
        for got, want in ((out, want_out), (state, want_state))
    ]
    assert max(errors) < EXACT
    evidence.add(
        {
            "type": "agreement",
            "level": "reference",
            "what": f"float64 recurrence against 40 digits, {regime}",
            "value": max(errors),
        }
    )


def dense(inputs):
    """The same rule without a recurrence: one triangular system over all tokens, in float64."""
    import torch

    q, k, v, g, beta = (getattr(inputs, name).double() for name in ("q", "k", "v", "g", "beta"))
    times = v.shape[2] // q.shape[2]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = ((x.repeat_interleave(times, 2)).transpose(1, 2) for x in (q * q.shape[-1] ** -0.5, k))
    v, since = v.transpose(1, 2), g.transpose(1, 2).cumsum(-1)
    beta = beta.transpose(1, 2)[..., None]
    apart = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
    rows = torch.eye(v.shape[2], dtype=torch.float64) + beta * (k @ k.mT) * apart.tril(-1)
    start = torch.zeros(()) if inputs.initial_state is None else inputs.initial_state.double()
    begun = since.exp()[..., None]
    wrote = torch.linalg.solve_triangular(rows, beta * (v - begun * (k @ start)), upper=False)
    return ((q @ k.mT * apart) @ wrote + begun * (q @ start)).transpose(1, 2)


@numerics(level="reference")
@pytest.mark.parametrize("regime", ["init", "long", "none", "correlated"])
def test_the_recurrence_agrees_with_one_triangular_system(regime):
    from taugate.numerics.cases import expected
    from taugate.numerics.measures import relative_error

    case = tiny(tokens=70, key_heads=2, value_heads=4, key_dim=16, value_dim=8, batch=2, regime=regime)
    inputs = case.inputs("fp32", seed=2)
    assert relative_error(dense(inputs), expected(case, inputs)[0]) < 1e-12


@numerics(level="reference")
def test_a_single_float32_inside_would_be_noticed(monkeypatch):
    """The bound is tight enough: the same reference with its decay rounded to float32 is far outside it."""
    import torch

    from taugate.numerics import reference
    from taugate.numerics.measures import relative_error

    inputs = tiny().inputs("fp32", seed=1)
    want = torch.tensor(with_mpmath(inputs, 3**-0.5)[0], dtype=torch.float64)
    stock = reference._recurrence
    monkeypatch.setattr(
        reference,
        "_recurrence",
        lambda q, k, v, decay, *rest: stock(q, k, v, decay.float().double(), *rest),
    )
    out, _ = reference.gated_delta_rule(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial_state=inputs.initial_state
    )
    assert relative_error(out, want) > 100 * EXACT


@numerics(level="reference")
def test_packed_sequences_are_each_alone():
    import torch

    from taugate.numerics.cases import part
    from taugate.numerics.reference import gated_delta_rule

    def rule(i):
        return gated_delta_rule(
            i.q, i.k, i.v, i.g, i.beta, initial_state=i.initial_state, cu_seqlens=i.cu_seqlens
        )

    inputs = tiny(tokens=9, cu_seqlens=(0, 1, 4, 9)).inputs("fp32", seed=3)
    out, states = rule(inputs)
    for number, (start, end) in enumerate(((0, 1), (1, 4), (4, 9))):
        from dataclasses import replace

        alone = replace(part(inputs, start, end, inputs.initial_state[number : number + 1]), cu_seqlens=None)
        want, state = rule(alone)
        assert torch.equal(out[:, start:end], want)
        assert torch.equal(states[number : number + 1], state)


@numerics(level="reference")
def test_the_layers_pieces_agree_with_40_digits():
    """Convolution with its taps in the right order, gates, and the norm before the gate."""
    import torch
    from mpmath import exp, log, mp, mpf, sqrt

    from taugate.numerics.reference import causal_conv1d, gated_rms_norm, gates

    mp.dps = 40
    draw = torch.Generator().manual_seed(0)
    x, w, state = (torch.randn(shape, generator=draw) for shape in ((1, 4, 2), (2, 3), (1, 2, 2)))
    silu = lambda y: y / (1 + exp(-y))  # noqa: E731
    padded = torch.cat([state, x], dim=1)
    for t in range(4):
        for c in range(2):
            taps = [mpf(float(padded[0, t + i, c])) * mpf(float(w[c, i])) for i in range(3)]
            assert float(causal_conv1d(x, w, state=state)[0, t, c]) == pytest.approx(float(silu(sum(taps))), rel=EXACT)
    a, b, a_log, dt_bias = torch.randn(4, 1, generator=draw).unbind()
    g, beta = gates(a, b, a_log, dt_bias)
    a, b, a_log, dt_bias = (mpf(float(y)) for y in (a, b, a_log, dt_bias))
    assert float(g) == pytest.approx(float(-exp(a_log) * log(1 + exp(a + dt_bias))), rel=EXACT)
    assert float(beta) == pytest.approx(float(1 / (1 + exp(-b))), rel=EXACT)
    u, z, weight = torch.randn(3, 4, generator=draw).unbind()
    normed = gated_rms_norm(u, z, weight, 1e-6)
    size = sqrt(sum(mpf(float(y)) ** 2 for y in u) / 4 + mpf("1e-6"))
    for i in range(4):
        want = mpf(float(u[i])) / size * mpf(float(weight[i])) * silu(mpf(float(z[i])))
        assert float(normed[i]) == pytest.approx(float(want), rel=EXACT)


@numerics(level="reference")
def test_the_layer_agrees_with_transformers_in_float32():
    """All pieces in their places: the layer of transformers in float32, on its own fallback, is within its noise."""
    from taugate.numerics.kernels import call
    from taugate.numerics.layer import LayerCase, build, expected_layer, run_layer
    from taugate.numerics.measures import relative_error
    from taugate.numerics.reference import GdnShape

    case = LayerCase("grouped, widths that differ", 30, shape=GdnShape(2, 4, 16, 8))
    layer = build(case, "fp32", seed=0)
    paths = [lambda inputs, kind=kind: call(f"torch-{kind}", inputs) for kind in ("chunk", "recurrent")]
    assert relative_error(run_layer(case, layer, *paths), expected_layer(case, layer)) < 2e-6


def test_shapes_that_do_not_fit_are_refused():
    from dataclasses import replace

    from taugate.errors import EvidenceError
    from taugate.numerics.reference import gated_delta_rule

    i = tiny().inputs("fp32", seed=0)
    i = replace(i, v=i.v[:, :, :1])
    with pytest.raises(EvidenceError, match="do not fit"):
        gated_delta_rule(i.q, i.k, i.v, i.g, i.beta)
    with pytest.raises(EvidenceError, match="do not divide one row of 5 tokens"):
        i = tiny().inputs("fp32", seed=0)
        gated_delta_rule(i.q, i.k, i.v, i.g, i.beta, cu_seqlens=(0, 4))
