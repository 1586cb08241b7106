"""The taker's end of a hand-off: dial the peer that the parameters name, and pull its blocks.

As on the real engine the first contact with a peer is a handshake, handshakes run one after another, and a
peer that does not answer holds all further first contacts up for five seconds, while known peers are read
meanwhile. A pull that fails is computed here instead (`kv_load_failure_policy: recompute`).
"""

import asyncio
import contextlib
from typing import Any

from fulcrum_simulator.engine import (
    HANDSHAKE_TIMEOUT_S,
    FetchStart,
    ImportKv,
    LinkEnd,
    held_digest,
    transfer_s,
)
from fulcrum_simulator.server.runner import Runner
from fulcrum_simulator.server.wire import LINE_LIMIT, WireError, line, read_message


class PullFailed(Exception):
    """The blocks did not arrive."""


class _Peer:
    """One connection to a giver."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def tell(self, **message: Any) -> None:
        """Send a message that has no answer."""
        self._writer.write(line(message))

    async def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message and read its answer.

        Raises:
            WireError: if the peer closes, or answers nonsense.
        """
        self.tell(**message)
        answer = await read_message(self._reader)
        if answer is None:
            raise WireError("closed by the peer")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def _dial(source: ImportKv) -> _Peer:
    return _Peer(*await asyncio.open_connection(source.host, source.port, limit=LINE_LIMIT))


class Taker:
    """Runs the pulls of one engine, each in a task of its own."""

    def __init__(self, runner: Runner, *, model: str, lease_s: float) -> None:
        self._runner, self._model, self._lease_s = runner, model, lease_s
        self._ingress = LinkEnd()
        self._handshaking = asyncio.Lock()
        self._known: set[str] = set()
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._notices: set[asyncio.Task[None]] = set()
        self.failures_to_come = 0

    def start(self, fetch: FetchStart, *, own: bytes) -> None:
        """Pull these blocks for the prompt with digest `own`, and report to the runner."""
        task = asyncio.get_running_loop().create_task(self._fetch(fetch, own))
        self._pulls[fetch.request_id] = task
        task.add_done_callback(lambda _: self._pulls.pop(fetch.request_id, None))

    def drop(self, request_id: str, source: ImportKv) -> None:
        """The request ended before its blocks came: stop pulling, and let the giver free them."""
        pull = self._pulls.get(request_id)
        if pull is not None:
            pull.cancel()
        if source.request_id is not None and source.block_ids is not None:
            notice = asyncio.get_running_loop().create_task(self._release(source))
            self._notices.add(notice)
            notice.add_done_callback(self._notices.discard)

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = [*self._pulls.values(), *self._notices]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, fetch: FetchStart, own: bytes) -> None:
        try:
            held = await asyncio.wait_for(self._pull(fetch), HANDSHAKE_TIMEOUT_S + self._lease_s)
        except (PullFailed, WireError, OSError, TimeoutError):
            self._runner.fetch_failed(fetch.request_id)
        else:
            self._runner.fetch_done(fetch.request_id, held_digest(held, own=own))

    async def _pull(self, fetch: FetchStart) -> tuple[bytes, ...]:
        if self.failures_to_come > 0:
            self.failures_to_come -= 1
            raise PullFailed("told to fail")
        await self._shake_hands(fetch.source)
        peer = await _dial(fetch.source)
        beats = asyncio.get_running_loop().create_task(self._beat(peer, fetch))
        try:
            return await self._read(peer, fetch)
        finally:
            beats.cancel()
            peer.close()

    async def _read(self, peer: _Peer, fetch: FetchStart) -> tuple[bytes, ...]:
        """Read the blocks, wait for this end of the link, tell the giver that it may free them."""
        runner, profile = self._runner, self._runner.engine.profile
        began_s = runner.now_s()
        answer = await peer.ask(
            pull=fetch.source.request_id,
            of=fetch.source.engine_id,
            blocks=fetch.remote_block_ids,
            bytes=fetch.kv_bytes,
        )
        held = answer.get("held")
        if not isinstance(held, list):
            raise PullFailed(str(answer.get("error")))
        seconds = transfer_s(
            fetch.kv_bytes, link_bytes_s=profile.link_bytes_s, link_setup_s=profile.link_setup_s
        )
        now_s = runner.now_s()
        slot = self._ingress.reserve(seconds, now_s=now_s - seconds)
        await asyncio.sleep(max(0.0, slot.end_s - now_s))
        runner.metrics.transferred(
            bytes_moved=fetch.kv_bytes, seconds=runner.now_s() - began_s, post_s=profile.link_setup_s
        )
        await self._tell_done(peer, fetch.source)
        return tuple(map(bytes.fromhex, held))

    async def _tell_done(self, peer: _Peer, source: ImportKv) -> None:
        """The blocks are here: a giver that cannot be told is counted, and harms nobody but itself."""
        try:
            await peer.ask(done=source.request_id)
        except (WireError, OSError):
            self._runner.metrics.notification_failed()

    async def _beat(self, peer: _Peer, fetch: FetchStart) -> None:
        while True:
            await asyncio.sleep(self._runner.engine.heartbeat_interval_s)
            peer.tell(beat=fetch.source.request_id)

    async def _shake_hands(self, source: ImportKv) -> None:
        """Make the peer known, one new peer at a time.

        Raises:
            PullFailed: it does not answer (after five seconds), or is not the engine that was named.
        """
        if source.engine_id in self._known:
            return
        async with self._handshaking:
            if source.engine_id in self._known:
                return
            began_s = self._runner.now_s()
            answer = await self._hello(source)
            if answer is None:
                await asyncio.sleep(max(0.0, began_s + HANDSHAKE_TIMEOUT_S - self._runner.now_s()))
                raise PullFailed("no answer to the handshake")
            if answer.get("engine_id") != source.engine_id or answer.get("model") != self._model:
                raise PullFailed("another engine than expected")
            due_s = began_s + self._runner.engine.profile.handshake_s
            await asyncio.sleep(max(0.0, due_s - self._runner.now_s()))
            self._known.add(source.engine_id)

    async def _hello(self, source: ImportKv) -> dict[str, Any] | None:
        """The peer's answer to the first contact, or None."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                peer = await _dial(source)
                with contextlib.closing(peer):
                    return await peer.ask(hello=self._model)
        except (WireError, OSError, TimeoutError):
            return None

    async def _release(self, source: ImportKv) -> None:
        """Tell a giver, known or not, that its blocks are not wanted."""
        with contextlib.suppress(WireError, OSError, TimeoutError):
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                peer = await _dial(source)
                with contextlib.closing(peer):
                    await peer.ask(done=source.request_id)
