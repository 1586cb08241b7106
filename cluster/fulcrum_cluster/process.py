"""Start and end of every program: command line errors, token file, sockets, ready line, parent process.

The `__main__` modules and `program` modules of all rooms call these functions. It imports nothing else of
this room, because the simulated engine server uses it too.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from fulcrum_core.errors import InvalidInput

_PR_SET_PDEATHSIG = 1


def die_with_parent(*, parent_pid: int | None = None, end_signal: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when the thread that started it ends.

    Linux only; elsewhere nothing happens. Nor does the first process of a container (pid 1) need this: its
    parent is the container runtime, whose threads end at any time.

    Args:
        parent_pid: `os.getppid()` as early as possible after the start. If the parent has another pid by
            now, it has ended already and this process exits at once. By default a parent that ended before
            the call goes unnoticed.
        end_signal: Signal to send.
    """
    if sys.platform != "linux" or os.getpid() == 1:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, end_signal, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(0)


def exit_if_stopped_while_starting() -> None:
    """Exit at once on SIGTERM, until another handler replaces this one.

    The kernel drops a signal for pid 1 of a container that has no handler. A pod that is deleted while its
    program imports modules would start, and run until its grace period is over. Call it before slow imports.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


ANY_ADDRESS = "*"
"""Host that stands for all addresses of this machine, IPv4 and IPv6."""


def bind_socket(host: str, port: int, *, option: str) -> socket.socket:
    """Return a bound TCP socket that does not listen yet, so that a port in use is reported at the start.

    With `ANY_ADDRESS` it accepts IPv4 and IPv6, or only IPv4 if the kernel has no IPv6.

    Raises:
        InvalidInput: naming the option, if the address cannot be bound.
    """
    both = host == ANY_ADDRESS and socket.has_dualstack_ipv6()
    address = ("::" if both else "0.0.0.0") if host == ANY_ADDRESS else host
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if both:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        bound.bind((address, port))
    except (OSError, UnicodeError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(option, f"{host}:{port}", f"cannot be bound: {reason.lower()}") from error
    bound.setblocking(False)
    return bound


def read_token_file(path: Path) -> str:
    """Read the token of the option --token-file; InvalidInput if the file is not readable or is empty."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise InvalidInput("--token-file", path, f"cannot be read: {reason.lower()}") from error
    if not token:
        raise InvalidInput("--token-file", path, "is empty")
    return token


def announce_ready(**ports: int) -> None:
    """Print the ready line on standard output: this process serves, on these ports."""
    print(f"ready {json.dumps(ports)}", flush=True)


def exit_with_error(message: object) -> NoReturn:
    """Print one line for the user on standard error and exit with code 2."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that reports a wrong command line in one line, without argparse's usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit (`exit_with_error`)."""
        exit_with_error(message)
