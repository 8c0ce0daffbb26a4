"""Empty modules in place of what SGLang imports and does not use on a CPU: kernels for GPUs, images and sound."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = ("sgl_kernel", "torchaudio", "torchvision")


class _Anything(type):
    """A class whose every attribute is another such class: it can be subclassed, called and subscripted."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Anything(name, (_Nothing,), {})
        setattr(cls, name, value)
        return value


class _Nothing(metaclass=_Anything):
    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __call__(self, *args: object, **options: object) -> _Nothing:
        return self

    def __class_getitem__(cls, item: object) -> type:
        return cls


class _Empty(ModuleType):
    __path__: list[str] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Anything(name, (_Nothing,), {})
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
