"""The side channel's wire format: one JSON object a line, each way, over TCP.

| taker to giver                                                           | giver to taker              |
|--------------------------------------------------------------------------|-----------------------------|
| {"hello": model}                                                         | {"engine_id", "model"}      |
| {"pull": request id, "of": engine id, "blocks": [block ids], "bytes": n} | {"held": [digests], in hex} |
| {"beat": request id}                                                     | nothing                     |
| {"done": request id}                                                     | {"freed": true or false}    |

A pull that cannot be served is answered with {"error": why}.
"""

import asyncio
from typing import Any

import orjson

LINE_LIMIT = 4 * 1024 * 1024


class WireError(Exception):
    """The peer closed the connection, or sent something that is not one of the lines above."""


def line(message: dict[str, Any]) -> bytes:
    """One message as it travels."""
    return orjson.dumps(message) + b"\n"


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream.

    Raises:
        WireError: for anything that is not a JSON object on a line.
    """
    try:
        raw = await reader.readline()
        message = orjson.loads(raw) if raw else None
    except (ValueError, OSError) as error:
        raise WireError(str(error)) from error
    if message is not None and not isinstance(message, dict):
        raise WireError("not a JSON object")
    return message
