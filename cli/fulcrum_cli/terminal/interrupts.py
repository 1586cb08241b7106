"""Ctrl-C and its relatives, told to an asyncio program in its own way."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_interrupt(callback: Callable[[], object]) -> Iterator[None]:
    """Calls `callback` on Ctrl-C, SIGTERM and SIGHUP while the context lasts."""
    loop = asyncio.get_running_loop()
    for number in _INTERRUPT_SIGNALS:
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in _INTERRUPT_SIGNALS:
            loop.remove_signal_handler(number)
