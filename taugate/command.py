"""What every command of ours says when it cannot go on: one sentence on standard error, and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from taugate.errors import TaugateError
from taugate.files import file_error


class Parser(argparse.ArgumentParser):
    """argparse that shows a description as it is written, and refuses in one sentence with status 2: the usage lines
    that usually come first would bury it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help shows what it takes\n")


def one_sentence(body: Callable[[], int], told: Callable[[str], None] = lambda sentence: None) -> int:
    """The exit status of `body`, or 1 after an error that a user can do something about; `told` gets its sentence,
    which goes to standard error. An error without a sentence is a bug and goes on as it is.
    """
    try:
        return body()
    except TaugateError as error:
        sentence = str(error)
    except OSError as error:
        sentence = file_error(error)
        if not sentence:
            raise
    told(sentence)
    print(sentence, file=sys.stderr)
    return 1
