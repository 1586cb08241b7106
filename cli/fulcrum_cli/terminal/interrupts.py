"""Runs a callback on Ctrl-C, SIGTERM and SIGHUP, inside the asyncio event loop.

`up`, `play` and `web` end with it; other commands end at once, as Python does.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_interrupt(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback` on SIGINT, SIGTERM and SIGHUP inside the context."""
    loop = asyncio.get_running_loop()
    for number in _INTERRUPT_SIGNALS:
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in _INTERRUPT_SIGNALS:
            loop.remove_signal_handler(number)
