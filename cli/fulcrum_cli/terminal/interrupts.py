"""Ctrl-C and its relatives, told to an asyncio program in its own way."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Calls `act` on Ctrl-C, SIGTERM and SIGHUP while the context lasts."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
