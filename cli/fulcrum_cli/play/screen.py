"""Draws frames on the terminal's alternate screen, and reads keys.

It draws only `FRAMES_PER_S` times a second, since it may share two processors with eight engines.

The command `play` runs both; what a frame looks like is `view`'s, and what a key does is `session`'s.
"""

import asyncio
import os
import re
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from rich.console import Console
from rich.live import Live

from fulcrum_cli.play.frame import Frame
from fulcrum_cli.play.view import draw

FRAMES_PER_S = 4


_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Web fonts in rich's SVG, which a browser would download; any fixed-width font will do."""


class Key(StrEnum):
    """Command of a key."""

    MOVING = "moving"
    STEADY = "steady"
    BURSTY = "bursty"
    TIERS = "tiers"
    FLOOD = "flood"
    UP = "up"
    DOWN = "down"
    FLIP = "flip"
    KILL = "kill"
    QUIT = "quit"


_KEY_STROKES = {
    "1": Key.MOVING, "m": Key.MOVING, "2": Key.STEADY, "s": Key.STEADY, "3": Key.BURSTY, "b": Key.BURSTY,
    "4": Key.TIERS, "t": Key.TIERS, "x": Key.FLOOD,
    "\x1b[A": Key.UP, "\x1bOA": Key.UP, "\x1b[B": Key.DOWN, "\x1bOB": Key.DOWN,
    "f": Key.FLIP, "k": Key.KILL, "q": Key.QUIT, "\x03": Key.QUIT,
}  # fmt: skip


def read_keys(typed: str) -> Iterator[Key]:
    """Yield the known keys in the typed text, in order; ignore the rest."""
    while typed:
        known = next((stroke for stroke in _KEY_STROKES if typed.startswith(stroke)), None)
        if known is not None:
            yield _KEY_STROKES[known]
        typed = typed[len(known or ".") :]


@contextmanager
def read_keyboard(on_key: Callable[[Key], None]) -> Iterator[None]:
    """Call `on_key` for every key inside the context; restore the terminal's settings afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def handle_input() -> None:
        for key in read_keys(os.read(descriptor, 1024).decode(errors="ignore")):
            on_key(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, handle_input)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def draw_frames(frame: Callable[[], Frame]) -> None:
    """Draw `frame()` repeatedly until cancelled."""
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            width, height = console.size
            live.update(draw(frame(), width=width, height=height), refresh=True)
            await asyncio.sleep(1 / FRAMES_PER_S)


def render_svg(frame: Frame, *, width: int = 120, height: int = 32) -> str:
    """Return the frame as an SVG image of a terminal."""
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, height=height, record=True, file=nowhere, force_terminal=True)
        console.print(draw(frame, width=width, height=height))
        return _FONT_FACE.sub("", console.export_svg(title="fulcrum play"))


def is_interactive() -> bool:
    """Whether input and output are a terminal that can be drawn on."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not Console().is_dumb_terminal
