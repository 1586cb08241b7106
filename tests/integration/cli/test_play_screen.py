"""The live view on a pseudo-terminal: it is drawn, reacts to keys and restores the screen."""

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

from tests.waiting import wait_until

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
DEADLINE_S = 30.0
WIDTH, HEIGHT = 110, 34


@dataclass
class Terminal:
    """The master end of a pseudo-terminal in which `fulcrum play` runs."""

    descriptor: int
    process: subprocess.Popen[bytes]
    shown: str = ""

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def read(self) -> None:
        try:
            self.shown += os.read(self.descriptor, 65536).decode(errors="replace")
        except (BlockingIOError, OSError):
            return  # no output yet, or the terminal is closed

    async def wait_until_shown(self, condition: Callable[[str], object]) -> None:
        """Wait until the output since the last call satisfies `condition`."""

        def is_shown() -> object:
            self.read()
            return condition(self.shown)

        await wait_until(is_shown, "the expected output", timeout_s=DEADLINE_S)
        self.shown = ""


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
    await terminal.wait_until_shown(lambda shown: ENTER in shown)
    await terminal.wait_until_shown(lambda shown: "prefill-heavy" in shown)
    terminal.type("2")
    await terminal.wait_until_shown(lambda shown: "load changed to steady" in shown)
    terminal.type("f")
    await terminal.wait_until_shown(lambda shown: "by key" in shown)
    terminal.type("\x1b[B\x1b[Bk")
    await terminal.wait_until_shown(lambda shown: "play-2 killed" in shown)
    await terminal.wait_until_shown(lambda shown: re.search(r"restart 1|→P 0 →D 1", shown))
    terminal.type("q")
    await terminal.wait_until_shown(lambda shown: LEAVE in shown and "attainment" in shown)
    assert terminal.process.wait(DEADLINE_S) == 0
