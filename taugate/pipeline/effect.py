"""Are the hidden states to blame? τ with states of both kernel paths, beside how far the paths are from the truth.

    python -m taugate.pipeline.effect --target DIR --drafter DIR [--drafter DIR …] --prompts FILE --completions FILE

Every sequence goes through the target three times: in float64, with the PyTorch fallback and with fla. The drafter is
replayed on the states of each, rounded to bfloat16 as they are stored. If Δτ between fla and the fallback is nothing
beside the gap that is to be explained, the states are not to blame for it.

On a machine without a GPU fla's kernels are interpreted: some ten seconds for a short sequence of the tiny target.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.drafter.replay import AnchorTable, CachedSequence, Verifier
from taugate.errors import TaugateError
from taugate.gate.tau import Bootstrap, Measurement, measure, paired_interval
from taugate.numerics.kernels import Kernels, open_kernels
from taugate.target.levels import Batch, Comparison, Divergence
from taugate.target.paths import PATHS, on_path

if TYPE_CHECKING:
    from torch import Tensor

    from taugate.pipeline.evaluate import Judged
    from taugate.target.trace import Trace

EXACT, BASELINE = "float64", "torch"
VERIFIERS = ("chain", "ddtree-8", "topk-8")


@dataclass(frozen=True)
class Effect:
    """Divergence of each path, and τ by (source of the states, drafter, verifier)."""

    target: str
    dtype: str
    divergences: tuple[Divergence, ...]
    taus: dict[tuple[str, str, str], Measurement]
    how: Bootstrap

    def records(self) -> list[dict[str, Any]]:
        """Records of type "effect": Δτ of fla's and of the exact states against the fallback's, paired by prompt."""
        found = []
        for (source, drafter, verifier), measured in self.taus.items():
            if source == BASELINE:
                continue
            baseline = self.taus[BASELINE, drafter, verifier]
            difference, low, high = paired_interval(measured, baseline, self.how)
            found.append({
                "type": "effect", "target": self.target, "dtype": self.dtype, "drafter": drafter, "verifier": verifier,
                "states": source, "baseline": BASELINE, "tau": measured.tau, "baseline_tau": baseline.tau,
                "difference": difference, "low": low, "high": high, "prompts": measured.prompts,
            })  # fmt: skip
        return found


def effect(
    target: Path,
    drafters: Sequence[Judged],
    sequences: Sequence[CachedSequence],
    kernels: Kernels,
    *,
    dtype: str = "bfloat16",
    verifiers: Sequence[str] = VERIFIERS,
    layers_alone: int = 1,
    how: Bootstrap | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Effect:
    """Capture `sequences` with every path on the device of `kernels`, and replay `drafters` on each path's states.

    layers_alone: so many sequences are also run with every layer fed the reference's input. Raises CheckpointError,
    KernelPathError and EvidenceError.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from taugate.target.reference import Reference

    reference = Reference.from_checkpoint(target, kernels.device)  # first: it says what is wrong with a checkpoint
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype), local_files_only=True)
    model = model.to(kernels.device).eval().requires_grad_(False)
    comparisons = {path: Comparison(reference, model, path, _name(dtype, kernels)) for path in PATHS}
    replay = _Replay(target, drafters, [Verifier.parse(name) for name in verifiers], kernels.device)
    for number, sequence in enumerate(sequences, 1):
        batch = Batch([list(sequence.token_ids)])
        exact = reference(batch.token_ids)
        replay.add(EXACT, sequence, exact)
        for path, comparison in comparisons.items():
            with on_path(model, path, kernels, _name(dtype, kernels)):
                replay.add(path, sequence, comparison.add(batch, exact))
                if number <= layers_alone:
                    comparison.add_layers(batch, exact)
        say(f"{number}/{len(sequences)} sequences, {kernels.launches.total()} kernel launches in the worker")
    how = how or Bootstrap()
    divergences = tuple(comparison.result() for comparison in comparisons.values())
    return Effect(target.name, _name(dtype, kernels), divergences, replay.measured(how), how)


def _name(dtype: str, kernels: Kernels) -> str:
    """float32 on a GPU is what production runs there: TF32 inside fla."""
    return "bf16" if dtype == "bfloat16" else "fp32" if kernels.device == "cpu" else "tf32"


class _Replay:
    """Tables of every drafter on the states of every source."""

    def __init__(
        self, target: Path, drafters: Sequence[Judged], verifiers: Sequence[Verifier], device: str
    ) -> None:
        import tempfile

        from taugate.drafter.model import load_drafter
        from taugate.target.head import read_bundle, write_bundle

        with tempfile.TemporaryDirectory() as scratch:
            write_bundle(target, Path(scratch) / "head.safetensors")
            self._bundle = [tensor.to(device) for tensor in read_bundle(Path(scratch) / "head.safetensors")]
        self._drafters = [(drafter, load_drafter(drafter.path, device=device)) for drafter in drafters]
        self._verifiers = verifiers
        self._tables: dict[tuple[str, str], list[AnchorTable]] = {}

    def add(self, source: str, sequence: CachedSequence, states: Trace) -> None:
        """Replay one sequence, if anything was ever drafted in it."""
        import torch

        from taugate.drafter.replay import anchor_table

        if not sequence.anchors():
            return
        for drafter, model in self._drafters:
            taps: list[Tensor] = [states.outputs[layer][0] for layer in drafter.config.target_layer_ids]
            joined = torch.cat([tap.to(torch.bfloat16) for tap in taps], dim=-1).float()  # as they are stored
            table = anchor_table(model, sequence, joined, *self._bundle, self._verifiers)
            self._tables.setdefault((source, drafter.name), []).append(table)

    def measured(self, how: Bootstrap) -> dict[tuple[str, str, str], Measurement]:
        by_name = {drafter.name: drafter for drafter, _ in self._drafters}
        return {
            (source, name, verifier.name): measure(
                name, by_name[name].sha256, by_name[name].config.block_size, tables, verifier, how
            )
            for (source, name), tables in self._tables.items()
            for verifier in self._verifiers
        }


def main(argv: list[str] | None = None) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m taugate.pipeline.effect", description=__doc__, formatter_class=layout)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint of the target")
    parser.add_argument("--drafter", type=Path, action="append", required=True, help="checkpoint of a drafter")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines: id, text or messages")
    parser.add_argument("--completions", type=Path, required=True, help="JSON lines: id, text, prompt_ids, output_ids")
    parser.add_argument("--max-new-tokens", type=int, default=80, help="cut completions here (default 80)")
    parser.add_argument("--limit", type=int, help="the first N prompts only")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the target's forward")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one, unless given")
    parser.add_argument("--layers-alone", type=int, default=1, help="sequences whose layers are also run one by one")
    args = parser.parse_args(argv)
    try:
        return _report(args)
    except TaugateError as error:
        print(error, file=sys.stderr)
        return 1


def _report(args: argparse.Namespace) -> int:
    from taugate.drafter.checkpoint import identity, read_config
    from taugate.pipeline.evaluate import Judged
    from taugate.pipeline.local import shipped_sequences
    from taugate.report.numerics import divergence_lines, effect_lines

    sequences = shipped_sequences(args.prompts, args.completions, args.max_new_tokens)[: args.limit]
    drafters = [Judged(path.name, path, identity(path), read_config(path)) for path in args.drafter]
    with open_kernels(args.device) as kernels:
        found = effect(
            args.target, drafters, sequences, kernels,
            dtype=args.dtype, layers_alone=args.layers_alone, say=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
    divergences = [divergence.record(found.target) for divergence in found.divergences]
    effects = found.records()
    print("\n".join([*divergence_lines(divergences), "", *effect_lines(effects)]))
    chain = {(r["drafter"], r["states"]): r["difference"] for r in effects if r["verifier"] == "chain"}
    torch_path, fla = found.divergences
    summary = {
        "target": found.target, "dtype": found.dtype, "prompts": len(sequences), "tokens": fla.tokens,
        "mixer_ratio_worst": round(max(a / b for a, b in zip(fla.mixer, torch_path.mixer, strict=True)), 3),
        "propagated_ratio_worst": round(
            max(a / b for a, b in zip(fla.propagated, torch_path.propagated, strict=True)), 3
        ),
        "final_hidden_f": {r["path"]: round(r["final_hidden"], 2) for r in divergences},
        "delta_tau_chain": {f"{drafter} {states}": round(value, 4) for (drafter, states), value in chain.items()},
    }  # fmt: skip
    print(json.dumps(summary, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
