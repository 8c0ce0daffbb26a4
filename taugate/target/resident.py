"""The resident engine: the whole text model on one GPU, on several (`device_map="auto"` of accelerate), or on a CPU.

One GPU is filled by our own loader, which reads at the speed of the link instead of one thread's. On several GPUs and
on a CPU transformers loads, which makes it the check of that loader; it casts what a checkpoint stores in fp32 for a
reason (`Layout.fp32_keys`), so that is put back afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.errors import GpuMemoryError
from taugate.target import memory
from taugate.target.kernels import enter_layer
from taugate.target.layout import open_layout
from taugate.target.loading import Loader, aligned_bytes, read_rows, views
from taugate.target.outbox import finite
from taugate.target.progress import LayerDone, SequenceDone
from taugate.target.segments import cache_argument, new_cache, segments
from taugate.target.skeleton import ATTENTION, fill, forward_dtypes, needed_depth, text_model_config
from taugate.target.store import FINAL_HIDDEN, tap_name

if TYPE_CHECKING:
    from torch import Tensor

# Multimodal checkpoints name the text model's tensors model.language_model.…; the text model itself has no prefix.
_RENAMED = {r"^model\.language_model\.": "", r"^language_model\.model\.": ""}

# Beside its weights a GPU needs the context, a segment's scratch and states; accelerate leaves no room for them.
BESIDE = 2048 * memory.MIB


class Resident:
    """Layers 0…deepest of a checkpoint, loaded whole. caps: bytes that each GPU may hold, context included."""

    def __init__(
        self, directory: Path, dtype: Any, device: str, taps: list[int], final: bool, caps: list[int]
    ) -> None:
        self.layout = open_layout(directory)
        self.taps, self.final, self.device, self.dtype = taps, final, device, dtype
        self.depth = needed_depth(text_model_config(directory).num_hidden_layers, taps, final)
        self.config = text_model_config(directory, self.depth)
        needed = model_bytes(self.layout, self.depth, dtype)
        if device != "cpu" and not self.fits(caps, needed):
            raise GpuMemoryError(_too_large(caps, needed))
        self._one_gpu = device != "cpu" and caps[0] - BESIDE >= needed
        if self._one_gpu:
            self.model = self._filled()
        else:
            room = {number: max(0, cap - BESIDE) for number, cap in enumerate(caps)}
            placement = {"device_map": "auto", "max_memory": room} if device != "cpu" else {}
            self.model = _load(directory, self.config, dtype, placement)
            self._restore_fp32()
            self._restore_frequencies()
        self._cache_argument = cache_argument(self.model.forward)

    @staticmethod
    def fits(caps: list[int], needed: int) -> bool:
        """Whether GPUs with these bytes to give hold a model of `needed` bytes."""
        return sum(max(0, cap - BESIDE) for cap in caps) >= needed

    def facts(self) -> dict[str, Any]:
        """Where the layers are."""
        placed = getattr(self.model, "hf_device_map", None) or {"": self.device}
        return {"name": "resident", "devices": sorted({str(device) for device in placed.values()})}

    def states(self, sequences: Sequence[Sequence[int]]) -> Iterator[LayerDone | SequenceDone]:
        """Raises CheckpointError for a state that is not finite."""
        for index, token_ids in enumerate(sequences):
            yield SequenceDone(index, self._run(list(token_ids)))

    def _run(self, token_ids: list[int]) -> dict[str, Tensor]:
        import torch

        kept: dict[str, list[Tensor]] = defaultdict(list)
        pieces = segments(len(token_ids))
        cache = new_cache(self.config) if len(pieces) > 1 else None
        given = {self._cache_argument: cache} if cache is not None else {}
        with torch.inference_mode(), self._hooks(kept):
            for begin, end in pieces:
                out = self.model(**self._inputs(token_ids[begin:end]), use_cache=cache is not None, **given)
                if self.final:
                    kept[FINAL_HIDDEN].append(out.last_hidden_state)
            states = {name: torch.cat(parts, dim=1)[0] for name, parts in kept.items()}
            return {name: finite(name, state).to("cpu", torch.bfloat16).contiguous() for name, state in states.items()}

    def _inputs(self, token_ids: list[int]) -> dict[str, Tensor]:
        """Embedded tokens where the table stayed in its file, else token ids."""
        import torch

        ids = torch.tensor(token_ids, dtype=torch.long)
        if not self._one_gpu:
            return {"input_ids": ids[None].to(next(self.model.parameters()).device)}
        rows = read_rows(self.layout.tensors["embed_tokens.weight"], ids)
        return {"inputs_embeds": rows[None].to(self.dtype).to(self.device)}

    @contextmanager
    def _hooks(self, kept: dict[str, list[Tensor]]) -> Iterator[None]:
        """Keep each tapped layer's output, and say which layer runs."""

        def before(layer: int) -> Any:
            return lambda _module, _inputs: enter_layer(layer)

        def after(layer: int) -> Any:
            def keep(_module: Any, _inputs: Any, output: Any) -> None:
                kept[tap_name(layer)].append(output[0] if isinstance(output, tuple) else output)

            return keep

        with ExitStack() as stack:
            for layer, module in enumerate(self.model.layers):
                stack.callback(module.register_forward_pre_hook(before(layer)).remove)
                if layer in self.taps:
                    stack.callback(module.register_forward_hook(after(layer)).remove)
            yield
            enter_layer(-1)

    def _filled(self) -> Any:
        """The model with its layers and final norm on the GPU; the embedding stays on the meta device."""
        import torch
        from transformers import AutoModel

        with torch.device("meta"):
            model = AutoModel.from_config(self.config, attn_implementation=ATTENTION)
        loader, under_way = Loader(self.device), []
        parts = [(f"layers.{n}.", model.layers[n], self.layout.layer_tensors(n)) for n in range(self.depth)]
        norm = {"weight": self.layout.tensors["norm.weight"]}
        for prefix, module, tensors in (*parts, ("norm.", model.norm, norm)):
            dtypes = forward_dtypes(self.layout, prefix, tensors, self.dtype)
            buffer = torch.empty(aligned_bytes(tensors, dtypes), dtype=torch.uint8, device=self.device)
            there = views(buffer, tensors, dtypes)
            under_way.append(loader.start(tensors, there))
            fill(module, there)
        for loading in under_way:
            if (arrived := loading.arrive()) is not None:
                torch.cuda.current_stream().wait_event(arrived)
        model.rotary_emb = type(model.rotary_emb)(config=self.config).to(self.device)
        return model.eval().requires_grad_(False)

    def _restore_fp32(self) -> None:
        """transformers loads everything in one precision; what the checkpoint keeps in fp32 is read again."""
        import torch

        loader = Loader("cpu")
        for layer, module in enumerate(self.model.layers):
            own = self.layout.layer_tensors(layer)
            keep = {key: own[key] for key in own if f"layers.{layer}.{key}" in self.layout.fp32_keys}
            if not keep:
                continue
            values = {key: torch.empty(t.shape, dtype=torch.float32) for key, t in keep.items()}
            loader.start(keep, values).arrive()
            device = next(module.parameters()).device
            fill(module, {key: value.to(device) for key, value in values.items()})

    def _restore_frequencies(self) -> None:
        """Rotary frequencies are computed on the CPU in both engines: a GPU's power function rounds differently."""
        rotary = self.model.rotary_emb
        fresh = type(rotary)(config=self.config)
        for name, buffer in rotary.named_buffers():
            buffer.copy_(dict(fresh.named_buffers())[name])


def model_bytes(layout: Any, depth: int, dtype: Any) -> int:
    """Bytes of layers 0…depth-1, embedding and final norm in `dtype`."""
    deep = {f"layers.{layer}." for layer in range(depth)}
    width = {"BF16": 2, "F16": 2, "F32": 4}
    counted = [t for k, t in layout.tensors.items() if not k.startswith("layers.") or _prefix(k) in deep]
    return sum(t.nbytes // width[t.dtype] * dtype.itemsize for t in counted)


def _prefix(key: str) -> str:
    return ".".join(key.split(".")[:2]) + "."


def _too_large(caps: list[int], needed: int) -> str:
    return (
        f"a resident capture of this target needs {needed // memory.MIB} MiB, and {BESIDE // memory.MIB} MiB on each "
        f"GPU beside, but {len(caps)} GPUs offer {sum(caps) // memory.MIB} MiB; "
        'set capture.engine to "streamed" or "auto"'
    )


def _load(directory: Path, config: Any, dtype: Any, placement: dict[str, Any]) -> Any:
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()  # standard output and error belong to the job's own lines
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list the head, vision and mtp, which are not loaded on purpose
    try:
        model = AutoModel.from_pretrained(
            directory, config=config, dtype=dtype, local_files_only=True, attn_implementation=ATTENTION,
            key_mapping=_RENAMED, **placement,
        )  # fmt: skip
    finally:
        logging.set_verbosity(before)
    away = {str(where) for where in getattr(model, "hf_device_map", {}).values()} & {"cpu", "disk"}
    if away and placement:
        raise GpuMemoryError(
            f"accelerate put parts of the target on {', '.join(sorted(away))} for want of GPU memory; "
            'set capture.engine to "streamed" or "auto"'
        )
    return model.eval().requires_grad_(False)
