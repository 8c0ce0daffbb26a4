"""States of the same prompts from two engines, batch layouts, kernel paths or GPUs, compared in units of f.

    python -m taugate.target.compare A B [--max-f 2]

A and B are each the output directory of a capture (`--out`), or a target's directory in a store,
.taugate/states/<target>. Sequences are matched by their tokens. Where a store has states of the same tokens more than
once, conditions on their identity choose: .taugate/states/<target>@kernel_path=fla,dtype=bfloat16

f = 1.66e-3 is the relative RMS error of rounding once to bfloat16: 1 f is what storing a state costs. B is the
reference. `pooled` is over all tokens of all sequences, `worst` the worst sequence, `token` the token that is furthest
off, relative to the RMS of its own sequence; `equal` the share of sequences that are the same bit for bit.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.command import Parser, one_sentence
from taugate.errors import EvidenceError, StoreError
from taugate.files import sha256_file, sha256_json
from taugate.numerics.measures import in_roundings, relative_error, token_maximum
from taugate.target.results import Results
from taugate.target.store import FINAL_HIDDEN, StateStore

if TYPE_CHECKING:
    from torch import Tensor

    Pair = tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Difference:
    """How far one tensor is apart over all sequences, in units of f; B is the reference. See above for the terms."""

    name: str
    sequences: int
    tokens: int
    pooled_f: float
    worst_f: float
    worst_sequence: str
    token_f: float
    token_index: int
    equal: float


@dataclass
class _Sums:
    """What accumulates over the sequences of one tensor name."""

    tokens: int = 0
    apart: float = 0.0
    size: float = 0.0
    equal: int = 0
    worst: list[tuple[float, str]] = field(default_factory=list)
    token: list[tuple[float, int]] = field(default_factory=list)

    def add(self, who: str, ours: Tensor, reference: Tensor) -> None:
        import torch

        error, far = relative_error(ours, reference), token_maximum(ours[None], reference[None])
        norm = float(reference.double().norm())
        self.tokens += len(reference)
        self.apart, self.size = self.apart + (error * norm) ** 2, self.size + norm**2
        self.equal += torch.equal(ours, reference)
        self.worst.append((error, who))
        self.token.append((far.error, far.index))


def compare(pairs: Iterable[Pair]) -> list[Difference]:
    """Compare (name of the sequence, its states [S, H] by name, the same from the reference), one row a tensor name.

    Sequences are read one at a time. Raises EvidenceError when there is nothing to compare, and for states whose
    shapes differ, that are not finite or all zeros.
    """
    sums: dict[str, _Sums] = defaultdict(_Sums)
    for who, ours, reference in pairs:
        if not (shared := ours.keys() & reference.keys()):
            raise EvidenceError(f"the two states of sequence {who} have no tensor in common")
        for name in shared:
            sums[name].add(who, ours[name], reference[name])
    if not sums:
        raise EvidenceError("the two have no sequence in common; states are matched by their token ids")
    return [_difference(name, sums[name]) for name in sorted(sums, key=_order)]


def _difference(name: str, found: _Sums) -> Difference:
    (worst, who), (token, index) = max(found.worst), max(found.token)
    pooled = (found.apart / found.size) ** 0.5
    return Difference(name, len(found.worst), found.tokens, in_roundings(pooled), in_roundings(worst), who,
                      in_roundings(token), index, found.equal / len(found.worst))  # fmt: skip


def _order(name: str) -> tuple[bool, int]:
    layer = name.rpartition(".")[2]
    return name == FINAL_HIDDEN, int(layer) if layer.isdigit() else 0


Loader = Callable[[], Mapping[str, Any]]


def source(text: str) -> dict[str, Loader]:
    """States by the hash of their token ids, see above. Raises StoreError for what holds none, or holds one twice."""
    path, _, conditions = text.partition("@")
    directory, wanted = Path(path), dict(part.partition("=")[::2] for part in conditions.split(",") if part)
    if not directory.is_dir():
        raise StoreError(f"{directory} is no directory of states")
    found: dict[str, list[tuple[dict[str, Any], Loader]]] = defaultdict(list)
    for tokens, facts, loader in [*_of_results(directory), *_of_store(directory)]:
        if all(str(facts.get(name)) == value for name, value in wanted.items()):
            found[tokens].append((facts, loader))
    if not found:
        raise StoreError(
            f"{directory} holds no states{' with ' + conditions if conditions else ''}; name the output directory of a "
            "capture, or of a store STORE/states/TARGET"
        )
    for several in found.values():
        if len(several) > 1:
            first, second = several[0][0], several[1][0]
            apart = [name for name in first if name != "token_ids" and first[name] != second.get(name)]
            raise StoreError(
                f"{directory} holds states of the same tokens more than once, and they differ in {', '.join(apart)}; "
                f"choose one with {directory}@{apart[0] if apart else 'dtype'}=VALUE"
            )
    return {tokens: several[0][1] for tokens, several in found.items()}


def _of_results(directory: Path) -> Iterator[tuple[str, dict[str, Any], Loader]]:
    """The states of a capture's output directory."""
    results = Results(directory)
    for path in sorted(directory.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StoreError(f"{path} is damaged ({error}); delete it to capture its states again") from None
        if isinstance(record, dict) and {"tokens_sha256", "sha256"} <= record.keys():
            yield record["tokens_sha256"], {"key": path.stem}, partial(_load, results.file(path.stem), record["sha256"])


def _of_store(directory: Path) -> Iterator[tuple[str, dict[str, Any], Loader]]:
    """The states of one target of a store."""
    store = StateStore(directory.parent.parent, directory.name)
    if store.root != directory:
        return
    for key in store.stored_keys():
        fields, names = store.meta(key)["fields"], store.names(key)
        yield sha256_json(fields["token_ids"]), fields, partial(store.load, key, names)


def _load(file: Path, sha256: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    if not file.is_file():
        raise StoreError(f"{file} is missing; delete its {file.stem}.json to capture the states again")
    if sha256_file(file) != sha256:
        raise StoreError(f"{file} does not have the content that {file.stem}.json names; delete both to capture again")
    return load_file(file)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m taugate.target.compare", description=__doc__)
    parser.add_argument("a", metavar="A", help="states to judge")
    parser.add_argument("b", metavar="B", help="the reference")
    parser.add_argument("--max-f", type=float, help="exit status 1 if a tensor's pooled error is above this many f")
    args = parser.parse_args(argv)
    return one_sentence(lambda: _report(args.a, args.b, args.max_f))


def _report(a: str, b: str, max_f: float | None) -> int:
    ours, reference = source(a), source(b)
    shared = [tokens for tokens in ours if tokens in reference]
    rows = compare((tokens[:12], ours[tokens](), reference[tokens]()) for tokens in shared)
    print(f"{'':14}{'sequences':>10}{'tokens':>9}{'pooled':>10}{'worst':>10}{'token':>10}{'equal':>8}   (f = 1.66e-3)")
    for row in rows:
        print(f"{row.name:14}{row.sequences:10}{row.tokens:9}{row.pooled_f:10.3f}{row.worst_f:10.3f}"
              f"{row.token_f:10.3f}{row.equal:8.0%}")  # fmt: skip
    above = [row.name for row in rows if max_f is not None and row.pooled_f > max_f]
    if above:
        print(f"above {max_f:g} f: {', '.join(above)}")
    alone = {"only_a": len(ours) - len(shared), "only_b": len(reference) - len(shared)}
    print(json.dumps({"rows": [asdict(row) for row in rows], **alone, "above": above}))
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
