"""Capture hidden states on the host: one sequence, one forward, one safetensors file.

    python -m taugate.target.capture --spec spec.json --out DIR

The spec is JSON: {"model_path", "kernel_path", "dtype", "device", "taps": [L, …], "sequences": [{"key", "token_ids"}]}.
Progress goes to stdout as JSON lines. Files that are complete already are kept, so an interrupted run goes on where
it stopped. Batch 1 per forward: batching changes the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taugate.errors import CheckpointError, TaugateError
from taugate.files import sha256_file, sha256_json
from taugate.target.kernels import kernel_path
from taugate.target.store import FINAL_HIDDEN, tap_name

# What decides the numbers of a state. A change here makes old states unusable, which is the point.
CODE = ("target/capture.py", "target/kernels.py")


def code_sha256(package: Path) -> str:
    """Hash of the source that computes states; `package` is the directory of the taugate package."""
    return sha256_json([[name, sha256_file(package / name)] for name in CODE])


def pick_device(wanted: str) -> str:
    """ "auto" is a GPU if torch sees one, else the CPU."""
    import torch

    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


class Capture:
    """The target resident on one device, ready to be run over sequences.

    dtype: "bfloat16" or "float32", the precision of the forward; states are stored in bfloat16 either way.
    """

    def __init__(
        self, model_path: str, path: str, dtype: str, device: str, taps: list[int], threads: int | None = None
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if threads:
            torch.set_num_threads(threads)
        self.device, self.path, self.taps = device, path, taps
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype), local_files_only=True)
        self.model = model.model.to(device).eval().requires_grad_(False)
        layers = len(self.model.layers)
        if outside := [tap for tap in taps if not 0 <= tap < layers]:
            raise CheckpointError(f"taps {outside} are outside the target's layers 0…{layers - 1}")
        self.model_type = model.config.get_text_config().model_type

    def __call__(self, token_ids: list[int]) -> dict[str, Any]:
        """Tensors [S, H] in bfloat16 on the CPU: `tap.L` for each tap and `final_hidden`."""
        import torch

        kept: dict[str, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                kept[tap_name(layer)] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        hooks = [self.model.layers[tap].register_forward_hook(keep(tap)) for tap in self.taps]
        try:
            with torch.inference_mode():
                ids = torch.tensor([token_ids], device=self.device)
                kept[FINAL_HIDDEN] = self.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        finally:
            for hook in hooks:
                hook.remove()
        states = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in kept.items()}
        for name, value in states.items():
            if not torch.isfinite(value).all():
                raise CheckpointError(
                    f"{name} of a sequence of {len(token_ids)} tokens is not finite; nothing was kept"
                )
        return states


def run(spec: dict[str, Any], out: Path) -> Iterator[dict[str, Any]]:
    """Capture what is missing in `out` and yield progress events; the last one is {"event": "done", …}."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    todo = [s for s in spec["sequences"] if not (out / f"{s['key']}.safetensors").is_file()]
    done = len(spec["sequences"]) - len(todo)
    device = pick_device(spec["device"])
    yield {"event": "loading", "done": done, "of": len(spec["sequences"]), "device": device}
    evidence: dict[str, Any] = {}
    if todo:
        capture = Capture(
            spec["model_path"], spec["kernel_path"], spec["dtype"], device, spec["taps"], spec.get("threads")
        )
        with kernel_path(spec["kernel_path"], capture.model_type, device) as ran:
            start = time.monotonic()
            for number, sequence in enumerate(todo, 1):
                partial = out / f".{sequence['key']}.partial"
                save_file(capture(sequence["token_ids"]), partial)
                if number == 1:
                    ran.require()  # a wrong path is known after one forward, not after all of them
                partial.replace(out / f"{sequence['key']}.safetensors")
                spent = time.monotonic() - start
                yield {
                    "event": "state",
                    "done": done + number,
                    "of": len(spec["sequences"]),
                    "tokens": len(sequence["token_ids"]),
                    "left_s": round(spent / number * (len(todo) - number), 1),
                }
            evidence = ran.require()
    files = {s["key"]: sha256_file(out / f"{s['key']}.safetensors") for s in spec["sequences"]}
    yield {"event": "done", "kernels": evidence, "files": files, "device": device}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, required=True, help="JSON file, see above")
    parser.add_argument("--out", type=Path, required=True, help="directory for KEY.safetensors")
    args = parser.parse_args(argv)
    spec = json.loads(args.spec.read_text())
    if spec["kernel_path"] == "torch":
        sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # importing it costs ten seconds for nothing
    try:
        for event in run(spec, args.out):
            print(json.dumps(event), flush=True)
    except TaugateError as error:
        print(json.dumps({"event": "error", "sentence": str(error)}), flush=True)
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
