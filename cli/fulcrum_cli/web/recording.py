"""Recordings: states of a live page, oldest first; gzip with one state of `page_model` as JSON on each line.

`fulcrum play` and `fulcrum web` write what their pages show; `fulcrum simulate` writes a run in this form.
`fulcrum web --replay` reads them.
"""

import gzip
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from fulcrum_cli.web.broadcast import Broadcast
from fulcrum_core.errors import InvalidInput

BYTES_MAX = 512 * 1024 * 1024
"""Limit of a file's states, uncompressed: about six hours of eight instances, ten minutes of 1,000."""
_COMPRESSION = 4
"""Level of gzip: quick, since `play` has other work for this machine."""


async def record(broadcast: Broadcast, path: Path, *, bytes_max: int = BYTES_MAX) -> None:
    """Write the states of a live page to the file until cancelled, or until it holds `bytes_max`.

    Raises:
        InvalidInput: if the file cannot be written.
    """
    size = 0
    try:
        with gzip.open(path, "wb", _COMPRESSION) as file, broadcast.open_page() as queue:
            while size < bytes_max:
                state = await queue.get()
                size += file.write(state + b"\n")
    except OSError as error:
        raise InvalidInput("--record", path, f"cannot be written: {error.strerror or error}") from error


def write_states(states: Iterable[dict[str, Any]], path: Path) -> None:
    """Write the states to the file, until it is full.

    Raises:
        InvalidInput: if the file cannot be written.
    """
    size = 0
    try:
        with gzip.open(path, "wb", _COMPRESSION) as file:
            for state in states:
                size += file.write(orjson.dumps(state, option=orjson.OPT_APPEND_NEWLINE))
                if size >= BYTES_MAX:
                    break
    except OSError as error:
        raise InvalidInput("--record", path, f"cannot be written: {error.strerror or error}") from error


def read_states(path: Path) -> Sequence[bytes]:
    """Read the lines of a file. The last one is left out if its writer was killed while it wrote.

    Raises:
        InvalidInput: if the file cannot be read, has no state, or holds more than `BYTES_MAX`.
    """
    lines: list[bytes] = []
    size = 0
    try:
        with gzip.open(path, "rb") as file, suppress(EOFError):
            while line := file.readline(BYTES_MAX):
                size += len(line)
                if size > BYTES_MAX:
                    raise InvalidInput("--replay", path, f"holds more than {BYTES_MAX >> 20} MiB of states")
                lines.append(line)
    except (OSError, zlib.error) as error:
        raise InvalidInput("--replay", path, f"cannot be read: {error}") from error
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    if not lines:
        raise InvalidInput("--replay", path, "has no state")
    return lines
