"""Recordings: states of a live page, oldest first; gzip with one state of `page_model` as JSON on each line.

`fulcrum play` and `fulcrum web` write what their pages show; `fulcrum simulate` writes a run in this form.
`fulcrum web --replay` reads them.
"""

import gzip
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from fulcrum_cli.output_files import replace_file
from fulcrum_cli.web.broadcast import Broadcast
from fulcrum_core.errors import InvalidInput

BYTES_MAX = 512 * 1024 * 1024
"""Limit of a file's states, uncompressed: about six hours of eight instances, ten minutes of 1,000."""
STATES_MAX = 100_000
"""Limit of a file's states: more than half a day of a page, which sends two a second."""
STATE_BYTES_MAX = 8 * 1024 * 1024
"""Limit of one state: about that of 10,000 instances."""
_COMPRESSION = 4
"""Level of gzip: quick, since `play` has other work for this machine."""


async def record(broadcast: Broadcast, path: Path, *, bytes_max: int = BYTES_MAX) -> None:
    """Write the states of a live page to the file until cancelled, or until it is full.

    Its size in bytes is limited by `bytes_max`.

    Raises:
        InvalidInput: if the file cannot be written.
    """
    size = 0
    try:
        with gzip.open(path, "wb", _COMPRESSION) as file, broadcast.open_page() as queue:
            for _ in range(STATES_MAX):
                size += file.write(await queue.get() + b"\n")
                if size >= bytes_max:
                    break
    except OSError as error:
        raise InvalidInput("--record", path, f"cannot be written: {error.strerror or error}") from error


def write_states(states: Iterable[dict[str, Any]], path: Path) -> None:
    """Write the states to the file, until it is full.

    Raises:
        InvalidInput: if the file cannot be written.
    """
    size = 0
    with (
        replace_file("--record", path) as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=_COMPRESSION) as file,
    ):
        for state in islice(states, STATES_MAX):
            size += file.write(orjson.dumps(state, option=orjson.OPT_APPEND_NEWLINE))
            if size >= BYTES_MAX:
                break


def read_states(path: Path) -> Sequence[bytes]:
    """Read the lines of a file. The last one is left out if its writer was killed while it wrote.

    Raises:
        InvalidInput: if the file cannot be read, has no state, or holds more than a recording may.
    """
    lines: list[bytes] = []
    size = 0
    try:
        with gzip.open(path, "rb") as file, suppress(EOFError):
            while line := file.readline(STATE_BYTES_MAX + 1):
                if size >= BYTES_MAX:
                    raise InvalidInput("--replay", path, f"holds more than {BYTES_MAX >> 20} MiB of states")
                if len(lines) == STATES_MAX:
                    raise InvalidInput("--replay", path, f"holds more than {STATES_MAX:,} states")
                if len(line) > STATE_BYTES_MAX:
                    raise InvalidInput("--replay", path, f"has a state above {STATE_BYTES_MAX >> 20} MiB")
                size += len(line)
                lines.append(line)
    except (OSError, zlib.error) as error:
        cause = (isinstance(error, OSError) and error.strerror) or error
        raise InvalidInput("--replay", path, f"cannot be read: {cause}") from error
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    if not lines:
        raise InvalidInput("--replay", path, "has no state")
    return lines
