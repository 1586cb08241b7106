"""The wire format of the side channel, over which KV blocks are pulled: one JSON object per line, over TCP.

| from the decode instance                                             | reply of the prefill instance |
|----------------------------------------------------------------------|-------------------------------|
| {"handshake": model}                                                 | {"engine_id", "model"}        |
| {"pull": request id, "engine_id", "blocks": [block ids], "bytes": n} | {"digests": [...], in hex}    |
| {"heartbeat": request id}                                            | none                          |
| {"release": request id}                                              | {"freed": true or false}      |

The reply to a pull that fails is {"error": reason}. `side_channel_puller` and `side_channel_server` speak it.
"""

import asyncio
from typing import Any

import orjson

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
"""Longest line."""


class SideChannelError(Exception):
    """The other end closed the connection or sent a line that is not in the format above."""


def encode_message(message: dict[str, Any]) -> bytes:
    """Encode one message as a line."""
    return orjson.dumps(message) + b"\n"


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Read the next message; None at the end of the stream.

    Raises:
        SideChannelError: if the line is not a JSON object, or the connection failed.
    """
    try:
        raw = await reader.readline()
        message = orjson.loads(raw) if raw else None
    except (ValueError, OSError) as error:
        raise SideChannelError(str(error)) from error
    if message is not None and not isinstance(message, dict):
        raise SideChannelError("not a JSON object")
    return message
