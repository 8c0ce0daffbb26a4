"""taugate: the truth about a speculative-decoding drafter before it is promoted."""

__version__ = "0.1.0"
