"""The side channel's wire format: one JSON object a line, each way, over TCP.

| taker to giver                                                           | giver to taker              |
|--------------------------------------------------------------------------|-----------------------------|
| {"handshake": model}                                                     | {"engine_id", "model"}      |
| {"pull": request id, "engine_id", "blocks": [block ids], "bytes": n}     | {"digests": [...], in hex} |
| {"heartbeat": request id}                                                | nothing                     |
| {"release": request id}                                                  | {"freed": true or false}    |

A pull that cannot be served is answered with {"error": why}.
"""

import asyncio
from typing import Any

import orjson

MESSAGE_BYTES_MAX = 4 * 1024 * 1024


class SideChannelError(Exception):
    """The peer closed the connection, or sent something that is not one of the lines above."""


def encode_message(message: dict[str, Any]) -> bytes:
    """One message as it travels."""
    return orjson.dumps(message) + b"\n"


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream.

    Raises:
        SideChannelError: for anything that is not a JSON object on a line.
    """
    try:
        raw = await reader.readline()
        message = orjson.loads(raw) if raw else None
    except (ValueError, OSError) as error:
        raise SideChannelError(str(error)) from error
    if message is not None and not isinstance(message, dict):
        raise SideChannelError("not a JSON object")
    return message
