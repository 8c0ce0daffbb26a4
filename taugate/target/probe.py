"""What the host's Python and the target's checkpoint are, asked before any window.

Imports torch and transformers, which takes seconds, only for a checkpoint that it has not seen before.

python -m taugate.target.probe --model-path DIR --memo FILE
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from taugate import __version__
from taugate.command import Parser, one_sentence
from taugate.files import sha256_json, write_atomic
from taugate.target.checkpoint import Progress, TargetInfo, find_checkpoint, read_target, tokenizer_files

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "flash-linear-attention",
    "fla-core",
    "triton",
    "accelerate",
    "causal-conv1d",
)
# Beyond these a capture cannot run; kernel paths other than "torch" need one more.
NEEDED = ("torch", "transformers", "safetensors")
KERNEL_PACKAGES = {"torch": "torch", "fla": "fla", "hub": "kernels", "flash_qla": "flash_qla"}


def probe(name: str, memo: Path, progress: Progress = lambda _: None) -> dict[str, Any]:
    """{"python", "versions", "missing", "paths", "model_path", "target", …}; `name` as in `find_checkpoint`.

    paths: the kernel paths whose package is installed.

    Raises CheckpointError for an unusable checkpoint: a shard that is missing or cut short, and (where torch is there
    to tell) a key that no module takes, a missing one or a wrong shape.
    """
    model_path = find_checkpoint(name)
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    # Before the layout is checked, which hides fla from this process.
    paths = [path for path, package in KERNEL_PACKAGES.items() if importlib.util.find_spec(package) is not None]
    target = read_target(model_path, memo, progress)
    if not missing:
        _check_layout(model_path, target, memo)
    return {
        "python": platform.python_version(),
        "versions": installed_versions(),
        "missing": missing,
        "paths": paths,
        "cuda": _torch_cuda(),
        "model_path": str(model_path),
        "target": target.to_json(),
        "tokenizer_files": [str(path) for path in tokenizer_files(model_path)],
    }


def _check_layout(model_path: Path, target: TargetInfo, memo: Path) -> None:
    """Check the tensors against the model's modules. A good answer is remembered: it takes transformers' import."""
    known = memo.with_name("layouts.json")
    what = sha256_json([target.weights_sha256, installed_versions().get("transformers"), __version__])
    try:
        checked = json.loads(known.read_text()) if known.is_file() else []
    except ValueError:
        checked = []
    checked = checked if isinstance(checked, list) else []
    if what not in checked:
        from taugate.target.layout import open_layout

        sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # importing it costs ten seconds for nothing
        open_layout(model_path)
        write_atomic(known, json.dumps([*checked, what]))


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for, read from its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", file.read_text(), re.MULTILINE)
    return found[1] if found else None


def installed_versions() -> dict[str, str]:
    """Versions of those of PACKAGES that are installed."""
    return {name: version for name in PACKAGES if (version := _version(name))}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m taugate.target.probe", description=__doc__)
    parser.add_argument("--model-path", required=True, help="a directory, or ORG/NAME in the Hugging Face cache")
    parser.add_argument("--memo", type=Path, required=True)
    args = parser.parse_args(argv)

    def tell() -> int:
        said = probe(args.model_path, args.memo, lambda event: print(json.dumps(event), flush=True))
        print(json.dumps(said), flush=True)
        return 0

    return one_sentence(tell)


if __name__ == "__main__":
    sys.exit(main())
