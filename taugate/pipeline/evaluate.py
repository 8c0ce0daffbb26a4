"""From cached states to measurements and verdicts. Needs no host and no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from taugate.config_schema import GateConfig, GateRule
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
    """Candidates and reference as configured. Raises CheckpointError before any host is contacted."""
    candidates = [_judged(path.name, path) for path in config.drafters.candidate]
    if not candidates:
        raise ConfigError("drafters.candidate is not set; name a checkpoint with --drafter")
    reference = config.drafters.reference
    return candidates, _judged("reference", reference) if reference else None


def _judged(name: str, path: Path) -> Judged:
    config = read_config(path)
    read_tensors(path, config)  # unusable weights must be known before a server is stopped for them
    return Judged(name, path, identity(path), config)


def verifiers(config: GateConfig) -> list[Verifier]:
    """Every verifier that a gate names, and those that are always printed, each once."""
    return [Verifier.parse(name) for name in dict.fromkeys([*ALWAYS, *(rule.verifier for rule in config.gate)])]


def replay(
    drafter: Judged, data: Dataset, names: Sequence[Verifier], say: Callable[[str], None] = lambda _: None
) -> list[AnchorTable]:
    """Tables of every sequence with at least one cycle, in the order of the prompts."""
    import torch

    from taugate.drafter.model import load_drafter

    model, bundle = load_drafter(drafter.path), data.head()
    taps = [tap_name(layer) for layer in drafter.config.target_layer_ids]
    tables = []
    for number, sequence in enumerate(data.sequences, 1):
        if not sequence.anchors():
            continue  # the prefill's token already ended it: nothing was ever drafted
        states = data.states(sequence, taps)
        joined = torch.cat([states[tap] for tap in taps], dim=-1).float()
        tables.append(anchor_table(model, sequence, joined, bundle.embedding, bundle.head, names, predict=True))
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
