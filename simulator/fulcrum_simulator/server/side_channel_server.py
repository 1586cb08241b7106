"""The prefill instance's end of the side channel: decode instances pull KV blocks from here.

A decode instance gets the contents that the blocks have when the transfer ends. No lease is checked, because
a real engine's memory is read remotely without its involvement. Stale or wrong parameters therefore yield the
text of another prompt, with status 200. `__main__` opens it beside the HTTP port.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.engine import LinkEnd, estimate_transfer_s
from fulcrum_simulator.server.runner import EngineRunner
from fulcrum_simulator.server.side_channel_protocol import (
    MESSAGE_BYTES_MAX,
    SideChannelError,
    encode_message,
    read_message,
)


class SideChannelServer:
    """Serves decode instances on the side channel; transfers are sent one after another."""

    def __init__(self, runner: EngineRunner, *, model: str, wait_while_hung: Callable[[], Any]) -> None:
        """`wait_while_hung()` returns an awaitable that completes once the engine is not hung."""
        self._runner, self._model, self._wait_while_hung = runner, model, wait_while_hung
        self._egress = LinkEnd()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a decode instance until either side closes it."""
        with contextlib.suppress(SideChannelError, ConnectionError):
            while (message := await read_message(reader)) is not None:
                await self._wait_while_hung()
                reply = await self._handle(message)
                if reply is not None:
                    writer.write(encode_message(reply))
        writer.close()

    async def _handle(self, message: dict[str, Any]) -> dict[str, Any] | None:
        match message:
            case {"handshake": str()}:
                return {"engine_id": self._runner.engine.engine_id, "model": self._model}
            case {
                "pull": str(),
                "engine_id": str() as engine_id,
                "blocks": [int(), *_] as blocks,
                "bytes": int() as size,
            }:
                if not all(type(block) is int for block in blocks):
                    raise SideChannelError("blocks are not numbers")
                if engine_id != self._runner.engine.engine_id:
                    return {"error": "this is another engine than the one requested"}
                return await self._send_blocks(tuple(blocks), size)
            case {"heartbeat": str() as request_id}:
                self._runner.engine.extend_lease(request_id, self._runner.now_s())
                return None
            case {"release": str() as request_id}:
                return {"freed": self._runner.release_lease(request_id)}
            case _:
                raise SideChannelError("unknown message")

    async def _send_blocks(self, blocks: tuple[int, ...], size: int) -> dict[str, Any]:
        """Wait for the transfer time on the link, then read the blocks."""
        profile = self._runner.engine.profile
        seconds = estimate_transfer_s(
            size, link_bytes_per_s=profile.link_bytes_per_s, link_setup_s=profile.link_setup_s
        )
        slot = self._egress.reserve(seconds, now_s=self._runner.now_s())
        await asyncio.sleep(max(0.0, slot.end_s - self._runner.now_s()))
        try:
            read = self._runner.engine.read_blocks(blocks)
        except InvalidInput as error:
            return {"error": str(error)}
        return {"digests": [digest.hex() for digest in dict.fromkeys(read)]}


async def start_side_channel_server(server: SideChannelServer, bound: socket.socket) -> asyncio.Server:
    """Listen for decode instances on a bound socket."""
    return await asyncio.start_server(server.serve, sock=bound, limit=MESSAGE_BYTES_MAX)
