"""A second formulation of a tiny target: scalar loops over mpmath numbers with 40 digits, from the definitions.

The delta rule is in the form of the paper, S ← α S (I − β k kᵀ) + β v kᵀ, and heads are indexed rather than repeated,
so that it shares neither code nor shape with the reference it judges.
"""

from __future__ import annotations

from typing import Any

from mpmath import cos, exp, log, mp, mpf, sin, sqrt

mp.dps = 40


def numbers(tensor: Any) -> Any:
    """A tensor's values, each exactly, in nested lists."""
    return [numbers(row) for row in tensor] if tensor.dim() else mpf(float(tensor))


def matvec(weight: Any, x: Any) -> Any:
    return [sum(a * b for a, b in zip(row, x, strict=True)) for row in weight]


def sigmoid(x: Any) -> Any:
    return 1 / (1 + exp(-x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def rms(x: Any, eps: Any) -> Any:
    size = sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v / size for v in x]


def norm(x: Any, weight: Any, config: dict[str, Any]) -> Any:
    one = 1 if config["hybrid"] else 0
    return [v * (one + w) for v, w in zip(rms(x, config["eps"]), weight, strict=True)]


def rotate(x: Any, position: int, config: dict[str, Any]) -> Any:
    half, out = config["rotary"] // 2, list(x)
    for i in range(half):
        angle = position * mpf(config["theta"]) ** (-mpf(i) / half)
        out[i] = x[i] * cos(angle) - x[i + half] * sin(angle)
        out[i + half] = x[i + half] * cos(angle) + x[i] * sin(angle)
    return out


def attention(rows: Any, w: dict[str, Any], config: dict[str, Any]) -> Any:
    """One token after the other; a Qwen3.5 query projection has each head's query and then its gate."""
    heads, kv_heads, width = config["heads"], config["kv_heads"], config["head_dim"]
    keys: list[Any] = []
    values: list[Any] = []
    out = []
    for t, x in enumerate(rows):
        q, k, v = (matvec(w[f"{name}_proj.weight"], x) for name in "qkv")
        own = [k[h * width : (h + 1) * width] for h in range(kv_heads)]
        keys.append([rotate(norm(head, w["k_norm.weight"], config), t, config) for head in own])
        values.append([v[h * width : (h + 1) * width] for h in range(kv_heads)])
        joined = []
        stride = 2 * width if config["hybrid"] else width
        for h in range(heads):
            query = rotate(norm(q[h * stride : h * stride + width], w["q_norm.weight"], config), t, config)
            group = h // (heads // kv_heads)
            seen = [key[group] for key in keys]
            weights = [exp(sum(a * b for a, b in zip(query, key, strict=True)) / sqrt(width)) for key in seen]
            mixed = [
                sum(weights[s] * values[s][group][i] for s in range(t + 1)) / sum(weights) for i in range(width)
            ]
            if config["hybrid"]:
                gate = q[h * stride + width : (h + 1) * stride]
                mixed = [m * sigmoid(g) for m, g in zip(mixed, gate, strict=True)]
            joined += mixed
        out.append(matvec(w["o_proj.weight"], joined))
    return out


def delta_net(rows: Any, w: dict[str, Any], config: dict[str, Any]) -> Any:
    key_heads, value_heads, width, depth = (config[n] for n in ("key_heads", "value_heads", "key_dim", "value_dim"))
    projected = [matvec(w["in_proj_qkv.weight"], x) for x in rows]
    taps = len(w["conv1d.weight"][0][0])
    states = [[[mpf(0)] * width for _ in range(depth)] for _ in range(value_heads)]  # S is value × key here
    out = []
    for t, x in enumerate(rows):
        mixed = [
            silu(sum(kernel[0][j] * projected[t - taps + 1 + j][c] for j in range(taps) if t - taps + 1 + j >= 0))
            for c, kernel in enumerate(w["conv1d.weight"])
        ]
        z, a, b = (matvec(w[f"in_proj_{name}.weight"], x) for name in "zab")
        joined = []
        for h in range(value_heads):
            group = h // (value_heads // key_heads)
            query = mixed[group * width : (group + 1) * width]
            key = mixed[(key_heads + group) * width : (key_heads + group + 1) * width]
            start = 2 * key_heads * width + h * depth
            value = mixed[start : start + depth]
            query = [v / sqrt(sum(q * q for q in query) + mpf(1e-6)) / sqrt(width) for v in query]
            key = [v / sqrt(sum(k * k for k in key) + mpf(1e-6)) for v in key]
            alpha = exp(-exp(w["A_log"][h]) * log(1 + exp(a[h] + w["dt_bias"][h])))
            beta, state = sigmoid(b[h]), states[h]
            for i in range(depth):
                seen = sum(s * k for s, k in zip(state[i], key, strict=True))
                state[i] = [
                    alpha * (s - beta * seen * k) + beta * value[i] * k for s, k in zip(state[i], key, strict=True)
                ]
            read = [sum(s * q for s, q in zip(row, query, strict=True)) for row in state]
            gate = z[h * depth : (h + 1) * depth]
            joined += [
                v * n * silu(g) for v, n, g in zip(rms(read, config["eps"]), w["norm.weight"], gate, strict=True)
            ]
        out.append(matvec(w["out_proj.weight"], joined))
    return out


def forward(token_ids: list[int], weights: dict[str, Any], config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(outputs of every layer, final hidden, logits); weights by inner name as nested lists of mpmath numbers."""
    rows, outputs = [weights["embed_tokens.weight"][i] for i in token_ids], []
    for layer in range(config["layers"]):
        w = {k.removeprefix(f"layers.{layer}."): v for k, v in weights.items() if k.startswith(f"layers.{layer}.")}
        normed = [norm(x, w["input_layernorm.weight"], config) for x in rows]
        linear = any(name.startswith("linear_attn.") for name in w)
        prefix, mixer = ("linear_attn.", delta_net) if linear else ("self_attn.", attention)
        mixed = mixer(normed, {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}, config)
        rows = [[a + b for a, b in zip(x, m, strict=True)] for x, m in zip(rows, mixed, strict=True)]
        for t, x in enumerate(rows):
            normed_x = norm(x, w["post_attention_layernorm.weight"], config)
            gate, up = (matvec(w[f"mlp.{name}_proj.weight"], normed_x) for name in ("gate", "up"))
            down = matvec(w["mlp.down_proj.weight"], [silu(g) * u for g, u in zip(gate, up, strict=True)])
            rows[t] = [a + b for a, b in zip(x, down, strict=True)]
        outputs.append(rows)
        rows = list(rows)
    final = [norm(x, weights["norm.weight"], config) for x in rows]
    return outputs, final, [matvec(weights["lm_head.weight"], x) for x in final]
