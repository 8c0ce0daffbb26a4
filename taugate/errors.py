"""Every error a user can see. Each carries one sentence: what was wrong, where, and what to do."""

from __future__ import annotations


class TaugateError(Exception):
    """Base of all errors that taugate raises on purpose."""


class ConfigError(TaugateError):
    """gate.toml, an environment variable or an option holds something unusable."""


class HostError(TaugateError):
    """The host could not be reached, or a command on it failed."""


class HostKeyError(HostError):
    """The host's SSH key is unknown or has changed."""


class DeadlineError(HostError):
    """Something on the host did not happen in time; it may still be going on."""


class PreflightError(HostError):
    """A check that runs before the server is stopped is red; nothing was touched."""


class LeaseLost(HostError):
    """The dead-man timer on the host is gone: the host has taken its GPUs back."""


class WindowError(HostError):
    """The window could not be opened, used or closed."""


class JobError(HostError):
    """A job on the host ended without its results."""


class CheckpointError(TaugateError):
    """A target or drafter checkpoint is incomplete or not what was expected."""


class StoreError(TaugateError):
    """A cached state or completion is missing or damaged."""


class KernelPathError(TaugateError):
    """Another implementation ran than the one that was asked for."""


class GpuMemoryError(TaugateError):
    """A capture does not fit in the GPU memory that it may take."""


class EvidenceError(TaugateError):
    """A number was asked for that the data cannot support."""
