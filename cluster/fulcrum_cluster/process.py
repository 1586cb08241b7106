"""What every program does at its start and end: the contract with whoever started it."""

import argparse
import ctypes
import json
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Be sent SIGTERM when the thread that started this process ends. Linux only; elsewhere nothing happens.

    To be called first of all: a parent that dies before the call is not noticed. A container's first process
    has no such parent but a runtime, whose threads come and go.
    """
    if sys.platform == "linux" and os.getpid() != 1:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def announce_ready(**ports: int) -> None:
    """Say on standard output, in one line, that this process serves and on which ports."""
    print(f"ready {json.dumps(ports)}", flush=True)


def exit_with_error(message: object) -> NoReturn:
    """End with one line for the user on standard error and exit code 2."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class ArgumentParser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line; argparse's own prints its usage, too."""

    def error(self, message: str) -> NoReturn:
        """See `exit_with_error`."""
        exit_with_error(message)
