"""Capture hidden states: for each sequence one safetensors file with `tap.L` and `final_hidden`, [S, H] in bfloat16.

    python -m taugate.target.capture --model DIR --sequences FILE --taps 1,3,5 --store .taugate
    python -m taugate.target.capture --spec spec.json --out DIR

The first form captures what the store lacks. FILE holds a JSON object a line with `token_ids`, or with `prompt_ids` and
`output_ids`. The second form is the job on a host: the spec is JSON, {"model_path", "kernel_path", "dtype", "device",
"taps": [L, …], "sequences": [{"key", "token_ids"}]}, and if wanted "final_hidden" (true), "engine" ("auto"),
"max_gpu_memory" (MiB on each GPU, context included), "threads"; results are KEY.safetensors and KEY.json.

Progress goes to stdout as JSON lines. What is complete already is kept, so a run that was killed goes on where it
stopped, and a second one does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from taugate.command import Parser, one_sentence
from taugate.errors import JobError, TaugateError
from taugate.files import disk_full
from taugate.target.capture import Capture, LayerDone, pick_device
from taugate.target.checkpoint import read_config, text_config
from taugate.target.compilations import share_autotuning
from taugate.target.jobspec import DEVICES, DTYPES, ENGINES, check_spec, read_spec
from taugate.target.kernels import PATHS, kernel_path
from taugate.target.layout import open_layout
from taugate.target.results import Results, complete_sequences


def run(spec: dict[str, Any], out: Path) -> Iterator[dict[str, Any]]:
    """Capture what is missing in `out` and yield progress events; the last one is {"event": "done", …}.

    Events: {"event": "loading", "done", "of", "device"}; {"event": "layer", …} of `LayerDone`; {"event": "state",
    "done", "of", "tokens", "bytes", "left_s"} after each file. Raises CheckpointError, KernelPathError and
    GpuMemoryError before anything is loaded, JobError when memory or disk run out; complete files stay.
    """
    share_autotuning()  # the check of the layout imports fla, and with it Triton
    check_spec(spec)
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out)
    results.sweep()
    files = complete_sequences(spec, out)
    todo, total = [s for s in spec["sequences"] if s["key"] not in files], len(spec["sequences"])
    device = pick_device(spec["device"])
    yield {"event": "loading", "done": len(files), "of": total, "device": device}
    cost: dict[str, Any] = {"tokens": 0, "load_s": 0.0, "seconds": 0.0}
    with _exhausted(out, files, total):
        if todo:
            begun = time.monotonic()
            _prove(spec, device)
            capture = Capture.from_spec(spec, device)
            cost["load_s"] = round(time.monotonic() - begun, 1)
            yield from _captured(capture, spec, todo, results, files, device, cost)
    yield {"event": "done", "files": files, "device": device, **cost}


def _prove(spec: dict[str, Any], device: str) -> None:
    """An unusable checkpoint, and kernels that cannot be bound, are known before weights are read or a GPU touched."""
    directory = Path(spec["model_path"])
    open_layout(directory)
    with kernel_path(spec["kernel_path"], text_config(read_config(directory))["model_type"], device):
        pass


def _captured(
    capture: Capture,
    spec: dict[str, Any],
    todo: list[dict[str, Any]],
    results: Results,
    files: dict[str, dict[str, Any]],
    device: str,
    cost: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Capture `todo`, write each sequence as soon as it is there, and add it to `files`."""
    total, start, finished = len(spec["sequences"]), time.monotonic(), 0
    with kernel_path(spec["kernel_path"], capture.model_type, device) as ran:
        for event in capture.states([s["token_ids"] for s in todo]):
            if isinstance(event, LayerDone):
                yield {"event": "layer", **event.to_json()}
                continue
            key, token_ids = todo[event.index]["key"], todo[event.index]["token_ids"]
            # What ran is proved before the first file is written, and again with each one.
            facts = {"kernels": ran.require(), "engine": capture.facts(), "device": device}
            files[key] = results.write(key, token_ids, event.tensors, facts)
            finished += 1
            spent = time.monotonic() - start
            cost |= {"tokens": cost["tokens"] + len(token_ids), "seconds": round(spent, 2)}
            yield {
                "event": "state",
                "done": len(files),
                "of": total,
                "tokens": len(token_ids),
                "bytes": sum(record["bytes"] for record in files.values()),
                "left_s": round(spent / finished * (len(todo) - finished), 1),
            }


@contextmanager
def _exhausted(out: Path, files: dict[str, Any], total: int) -> Iterator[None]:
    """Turn an exhausted disk, GPU or memory into one sentence that says what is kept and what to do."""
    try:
        yield
    except TaugateError:
        raise
    except Exception as error:
        kept = f"{len(files)} of {total} sequences are captured and stay, and the next run goes on from there"
        if said := disk_full(error):
            raise JobError(f"the disk of {out} {said}: make room there; {kept}") from error
        if said := _memory(error):
            raise JobError(f"{said}; {kept}") from error
        raise


def _memory(error: BaseException) -> str | None:
    text = str(error)
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") and "memory" in text:
        return (
            f"the GPU has too little memory for the capture ({text.splitlines()[0].rstrip('.')}): set capture.engine "
            'to "streamed" or capture.max_gpu_memory to less, or use shorter prompts'
        )
    # A library that no longer fits fails as an import.
    said = {RuntimeError: "allocate memory", ImportError: "failed to map segment"}
    if isinstance(error, MemoryError) or any(isinstance(error, kind) and word in text for kind, word in said.items()):
        return "the host has too little memory for the capture: end what else runs there, or use shorter prompts"
    return None


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m taugate.target.capture", description=__doc__)
    parser.add_argument("--spec", type=Path, help="JSON file of a job, see above; goes with --out")
    parser.add_argument("--out", type=Path, help="directory for KEY.safetensors and KEY.json")
    parser.add_argument("--model", help="checkpoint: a directory, or ORG/NAME in the Hugging Face cache")
    parser.add_argument("--sequences", type=Path, help="JSON lines with token ids, see above")
    parser.add_argument("--taps", type=_layers, default=[], help="decoder layers, 0-based, separated by commas")
    parser.add_argument("--no-final-hidden", dest="final_hidden", action="store_false", help="only the taps")
    parser.add_argument("--store", type=Path, default=Path(".taugate"), help="default: %(default)s")
    parser.add_argument("--kernel-path", choices=PATHS, default="torch", help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="auto: by the memory that is free")
    parser.add_argument("--max-gpu-memory", metavar="SIZE", help='on each GPU, context included: "6GiB", "3000 MiB"')
    parser.add_argument("--threads", type=_count, help="threads of torch on a CPU")
    args = parser.parse_args(argv)
    job, here = (bool(args.spec), bool(args.out)), (bool(args.model), bool(args.sequences))
    if {job, here} != {(True, True), (False, False)}:
        parser.error("give either --spec and --out, or --model and --sequences")

    def capture() -> int:
        for event in _job(args) if args.spec else _into_store(args):
            print(json.dumps(event), flush=True)
        return 0

    return one_sentence(capture, lambda said: print(json.dumps({"event": "error", "sentence": said}), flush=True))


def _job(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spec = read_spec(args.spec)
    _prepare(spec["kernel_path"])
    return run(spec, args.out)


def _into_store(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from taugate.target.here import Wanted, capture_into_store, read_sequences

    options = {"engine": args.engine, "max_gpu_memory": args.max_gpu_memory, "threads": args.threads}
    wanted = Wanted(args.kernel_path, args.dtype, args.device, tuple(args.taps), args.final_hidden, options)
    _prepare(args.kernel_path)
    return capture_into_store(args.model, read_sequences(args.sequences), wanted, args.store)


def _prepare(kernel_path: str) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' own bar; ours is made from the events
    if kernel_path == "torch":
        sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # importing it costs ten seconds for nothing


def _layers(text: str) -> list[int]:
    try:
        return sorted(set(map(int, text.split(",")))) if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 1,3,5") from None


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
