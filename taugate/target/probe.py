"""What the host's Python and the target's checkpoint are, asked before any window.

Imports neither torch nor transformers, which takes seconds.

python -m taugate.target.probe --model-path DIR --memo FILE
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from taugate.errors import TaugateError
from taugate.target.checkpoint import read_target, tokenizer_files

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
# Beyond these a capture cannot run; kernel path "fla" also needs fla.
NEEDED = ("torch", "transformers", "safetensors")


def probe(model_path: Path, memo: Path) -> dict[str, Any]:
    """{"python", "versions", "missing", "target"}; raises CheckpointError for an unusable checkpoint."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return {
        "python": platform.python_version(),
        "versions": installed_versions(),
        "missing": missing,
        "fla": importlib.util.find_spec("fla") is not None,
        "cuda": _torch_cuda(),
        "target": read_target(model_path, memo).to_json(),
        "tokenizer_files": [str(path) for path in tokenizer_files(model_path)],
    }


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--memo", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        print(json.dumps(probe(args.model_path, args.memo)), flush=True)
    except TaugateError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
