"""From cached states to measurements and verdicts. Needs no host and no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from taugate.config_schema import GateConfig, GateRule, Replay
from taugate.drafter.checkpoint import DrafterConfig, identity, read_config, read_tensors
from taugate.drafter.replay import AnchorTable, Verifier, anchor_table
from taugate.errors import ConfigError
from taugate.gate.fidelity import Fidelity, on_policy
from taugate.gate.tau import Bootstrap, Measurement, measure
from taugate.gate.verdict import Verdict, reference_verdict, threshold_verdict
from taugate.pipeline.dataset import Dataset
from taugate.target.store import FINAL_HIDDEN, tap_name

# Printed beside every gate, so that nobody mistakes one for another: the trees of 8 and 15 nodes, and the upper
# bound that training notes quote as if it were a tree.
ALWAYS = ("chain", "ddtree-8", "ddtree-15", "topk-8")


@dataclass(frozen=True)
class Judged:
    """One drafter: its name in reports, where it is, its content hash and its config."""

    name: str
    path: Path
    sha256: str
    config: DrafterConfig


def read_drafters(config: GateConfig) -> tuple[list[Judged], Judged | None]:
    """Candidates and reference as configured. Raises CheckpointError before any host is contacted.

    Candidates are named by their directories, and by as much of the path before as tells them apart.
    """
    paths = config.drafters.candidate
    if not paths:
        raise ConfigError("drafters.candidate is not set; name a checkpoint with --drafter")
    candidates = [_judged(name, path) for name, path in zip(short_names(paths), paths, strict=True)]
    reference = config.drafters.reference
    return candidates, _judged("reference", reference) if reference else None


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or the last two, three, … of all, until different paths have different names."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _judged(name: str, path: Path) -> Judged:
    config = read_config(path)
    read_tensors(path, config)  # unusable weights must be known before a server is stopped for them
    return Judged(name, path, identity(path), config)


def verifiers(config: GateConfig) -> list[Verifier]:
    """Every verifier that a gate names, and those that are always printed, each once."""
    return [Verifier.parse(name) for name in dict.fromkeys([*ALWAYS, *(rule.verifier for rule in config.gate)])]


def replay(
    drafter: Judged,
    data: Dataset,
    names: Sequence[Verifier],
    how: Replay | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[AnchorTable]:
    """Tables of every sequence with at least one cycle, in the order of the prompts.

    With `how.temperature` above 0 they hold the sampling acceptance too, from p that the target's own head gives for
    its captured states; not for DFlash 2, where it is not defined per slot.
    """
    import torch

    from taugate.drafter.model import load_drafter

    how = how or Replay()
    device = how.device if how.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = how.dtype if how.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    model, bundle = load_drafter(drafter.path, getattr(torch, dtype), device), data.head(dtype)
    embedding, head = bundle.embedding.to(device), bundle.head.to(device)
    taps = [tap_name(layer) for layer in drafter.config.target_layer_ids]
    sampled = how.temperature > 0 and drafter.config.dflash2 is None
    tables = []
    for number, sequence in enumerate(data.sequences, 1):
        if not sequence.anchors():
            continue  # the prefill's token already ended it: nothing was ever drafted
        states = data.states(sequence, [*taps, *([FINAL_HIDDEN] if sampled else [])])
        joined = torch.cat([states[tap] for tap in taps], dim=-1)
        final = states[FINAL_HIDDEN] if sampled else None
        tables.append(
            anchor_table(
                model, sequence, joined, embedding, head, names, how.anchors,
                predict=True, final_hidden=final, temperature=how.temperature,
            )
        )  # fmt: skip
        if number % 16 == 0 or number == len(data.sequences):
            say(f"replayed {drafter.name} on {number}/{len(data.sequences)} prompts")
    return tables


def fidelity(data: Dataset, noise: float) -> Fidelity:
    """On-policy rate of all sequences; see `taugate.gate.fidelity`."""
    head = data.head().head
    return on_policy(((s, data.states(s, [FINAL_HIDDEN])[FINAL_HIDDEN]) for s in data.sequences), head, noise)


def measurements(
    drafter: Judged, tables: Sequence[AnchorTable], names: Sequence[Verifier], config: GateConfig
) -> dict[str, Measurement]:
    """τ by verifier name."""
    how = bootstrap(config)
    return {v.name: measure(drafter.name, drafter.sha256, drafter.config.block_size, tables, v, how) for v in names}


def judge(
    rule: GateRule,
    measured: dict[str, Measurement],
    reference: dict[str, Measurement] | None,
    config: GateConfig,
) -> list[Verdict]:
    """One verdict per threshold of a rule. Raises ConfigError if it compares with a reference that is not there."""
    prompts, verdicts = config.statistics.min_prompts, []
    if rule.min_tau is not None:
        verdicts.append(threshold_verdict(measured[rule.verifier], rule.min_tau, prompts))
    if rule.max_loss_to_reference is not None:
        if reference is None:
            raise ConfigError(
                "a gate has max_loss_to_reference, but drafters.reference is not set; name one with --reference"
            )
        margin = rule.max_loss_to_reference
        verdicts.append(
            reference_verdict(measured[rule.verifier], reference[rule.verifier], margin, prompts, bootstrap(config))
        )
    return verdicts


def bootstrap(config: GateConfig) -> Bootstrap:
    return Bootstrap(config.statistics.draws, config.statistics.tail, config.statistics.seed)
