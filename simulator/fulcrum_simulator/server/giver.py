"""The giver's end of the side channel: peers pull KV cache from here.

What a peer gets is what the blocks hold when the transfer ends, whoever asks and whatever was promised, and
no lease is checked: a real engine's memory is read past it, without asking. So parameters that are stale or
wrong yield another prompt's text with status 200.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.engine import LinkEnd, transfer_s
from fulcrum_simulator.server.runner import Runner
from fulcrum_simulator.server.wire import LINE_LIMIT, WireError, line, read_message


class Giver:
    """Answers peers on the side channel; transfers leave one after another."""

    def __init__(self, runner: Runner, *, model: str, while_hung: Callable[[], Any]) -> None:
        """`while_hung()` returns an awaitable that ends when the engine does not hang (any more)."""
        self._runner, self._model, self._while_hung = runner, model, while_hung
        self._egress = LinkEnd()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a peer, until either end closes it."""
        with contextlib.suppress(WireError, ConnectionError):
            while (message := await read_message(reader)) is not None:
                await self._while_hung()
                answer = await self._answer(message)
                if answer is not None:
                    writer.write(line(answer))
        writer.close()

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        match message:
            case {"hello": str()}:
                return {"engine_id": self._runner.engine.engine_id, "model": self._model}
            case {
                "pull": str(),
                "of": str() as engine_id,
                "blocks": [int(), *_] as blocks,
                "bytes": int() as size,
            }:
                if not all(type(block) is int for block in blocks):
                    raise WireError("blocks are not numbers")
                if engine_id != self._runner.engine.engine_id:
                    return {"error": "another engine lives here now"}
                return await self._pull(tuple(blocks), size)
            case {"beat": str() as request_id}:
                self._runner.engine.heartbeat(request_id, self._runner.now_s())
                return None
            case {"done": str() as request_id}:
                return {"freed": self._runner.pulled(request_id)}
            case _:
                raise WireError("unknown message")

    async def _pull(self, blocks: tuple[int, ...], size: int) -> dict[str, Any]:
        """Send the blocks when the link is free; read them at the end, when they leave."""
        profile = self._runner.engine.profile
        seconds = transfer_s(size, link_bytes_s=profile.link_bytes_s, link_setup_s=profile.link_setup_s)
        slot = self._egress.reserve(seconds, now_s=self._runner.now_s())
        await asyncio.sleep(max(0.0, slot.end_s - self._runner.now_s()))
        try:
            read = self._runner.engine.read_blocks(blocks)
        except InvalidInput as error:
            return {"error": str(error)}
        return {"held": [digest.hex() for digest in dict.fromkeys(read)]}


async def start_giver(giver: Giver, bound: socket.socket) -> asyncio.Server:
    """Listen for peers on a bound socket."""
    return await asyncio.start_server(giver.serve, sock=bound, limit=LINE_LIMIT)
