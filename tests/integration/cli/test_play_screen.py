"""The live view on a real (pseudo) terminal: drawn, obeying keys, and gone without a trace."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
DEADLINE_S = 30.0
WIDTH, HEIGHT = 110, 34


@dataclass
class Terminal:
    """The far end of a terminal in which `fulcrum play` runs."""

    descriptor: int
    process: subprocess.Popen[bytes]
    seen: str = ""

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def read(self) -> None:
        try:
            self.seen += os.read(self.descriptor, 65536).decode(errors="replace")
        except (BlockingIOError, OSError):
            return  # nothing yet, or the terminal is closed

    async def shows(self, holds: Callable[[str], object]) -> None:
        """Waits until what was shown since the last call satisfies `holds`."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds(self.seen):
                await asyncio.sleep(0.02)
                self.read()
        self.seen = ""


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    os.set_blocking(ours, False)
    with tempfile.TemporaryDirectory(prefix="fulcrum-") as folder:
        env = {**os.environ, "XDG_RUNTIME_DIR": folder, "TERM": "xterm-256color"}
        command = [sys.executable, "-m", "fulcrum_cli", "play", "--mode", "Off"]
        process = subprocess.Popen(
            command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        yield Terminal(ours, process)
        process.kill()
        process.wait()
        os.close(ours)


async def test_keys_change_the_load_flip_kill_and_quit(terminal: Terminal) -> None:
    await terminal.shows(lambda seen: ENTER in seen)
    await terminal.shows(lambda seen: "prefill-heavy" in seen)
    terminal.type("2")
    await terminal.shows(lambda seen: "load changed to steady" in seen)
    terminal.type("f")
    await terminal.shows(lambda seen: "by key" in seen)
    terminal.type("\x1b[B\x1b[Bk")
    await terminal.shows(lambda seen: "play-2 killed" in seen)
    await terminal.shows(lambda seen: re.search(r"restart 1|→P 0 →D 1", seen))
    terminal.type("q")
    await terminal.shows(lambda seen: LEAVE in seen and "attainment" in seen)
    assert terminal.process.wait(DEADLINE_S) == 0
