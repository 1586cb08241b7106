"""The decode instance's end of the side channel: pulls blocks from the source of a KV transfer.

The source is the prefill instance that the KV transfer parameters name. As on the real engine, the first
contact with a source is a handshake, and handshakes run one after another: while a new source does not
respond, for at most five seconds, other new sources wait, but pulls from known ones go on. If a pull fails,
the engine computes the prompt itself (`kv_load_failure_policy: recompute`). `runner` starts and cancels
pulls.
"""

import asyncio
import contextlib
from typing import Any

from fulcrum_simulator.engine import (
    HANDSHAKE_TIMEOUT_S,
    KvFetch,
    KvImportRequest,
    LinkEnd,
    estimate_transfer_s,
    pulled_digest,
)
from fulcrum_simulator.server.runner import EngineRunner
from fulcrum_simulator.server.side_channel_protocol import (
    MESSAGE_BYTES_MAX,
    SideChannelError,
    encode_message,
    read_message,
)


class PullFailed(Exception):
    """The blocks did not arrive."""


class _SourceConnection:
    """One connection to a source."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, **message: Any) -> None:
        """Send a message that has no reply."""
        self._writer.write(encode_message(message))

    async def request(self, **message: Any) -> dict[str, Any]:
        """Send a message and return the reply.

        Raises:
            SideChannelError: if the source closes the connection or sends invalid data.
        """
        self.send(**message)
        reply = await read_message(self._reader)
        if reply is None:
            raise SideChannelError("closed by the source")
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def _connect(source: KvImportRequest) -> _SourceConnection:
    return _SourceConnection(
        *await asyncio.open_connection(source.host, source.port, limit=MESSAGE_BYTES_MAX)
    )


class SideChannelPuller:
    """Runs the pulls of one engine, each in its own task; reports each end to the runner.

    Implements `runner.KvPuller`.
    """

    def __init__(self, runner: EngineRunner, *, model: str, lease_s: float) -> None:
        self._runner, self._model, self._lease_s = runner, model, lease_s
        self._ingress = LinkEnd()
        self._handshake_lock = asyncio.Lock()
        self._known_sources: set[str] = set()
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        """Tasks that free the blocks of cancelled requests on their sources."""
        self._pulls_to_fail = 0
        """Number of the next pulls that fail because of an injected fault."""
        self.slow_factor = 1.0
        """Multiple of the time of each pull, because of an injected fault."""

    def start_pull(self, fetch: KvFetch, *, own_digest: bytes) -> None:
        """See `runner.KvPuller`."""
        task = asyncio.get_running_loop().create_task(self._run_pull(fetch, own_digest))
        self._pulls[fetch.request_id] = task
        task.add_done_callback(lambda _: self._pulls.pop(fetch.request_id, None))

    def cancel(self, request_id: str, source: KvImportRequest) -> None:
        """See `runner.KvPuller`."""
        pull = self._pulls.get(request_id)
        if pull is not None:
            pull.cancel()
        if source.request_id is not None and source.block_ids is not None:
            release = asyncio.get_running_loop().create_task(self._release_after_cancel(source))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    def fail_next_pulls(self, count: int) -> None:
        """Make the next `count` pulls fail (an injected fault); 0 ends the fault."""
        self._pulls_to_fail = count

    async def close(self) -> None:
        """Cancel all pulls and releases."""
        tasks = [*self._pulls.values(), *self._releases]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_pull(self, fetch: KvFetch, own_digest: bytes) -> None:
        try:
            digests = await asyncio.wait_for(self._pull(fetch), HANDSHAKE_TIMEOUT_S + self._lease_s)
        except (PullFailed, SideChannelError, OSError, TimeoutError):
            self._runner.fail_fetch(fetch.request_id)
        else:
            self._runner.complete_fetch(fetch.request_id, pulled_digest(digests, own_digest=own_digest))

    async def _pull(self, fetch: KvFetch) -> tuple[bytes, ...]:
        if self._pulls_to_fail > 0:
            self._pulls_to_fail -= 1
            raise PullFailed("injected fault")
        await self._ensure_handshake(fetch.source)
        connection = await _connect(fetch.source)
        heartbeats = asyncio.get_running_loop().create_task(self._send_heartbeats(connection, fetch))
        try:
            return await self._pull_blocks(connection, fetch)
        finally:
            heartbeats.cancel()
            connection.close()

    async def _pull_blocks(self, connection: _SourceConnection, fetch: KvFetch) -> tuple[bytes, ...]:
        """Pull the blocks, wait for this end's link, then have the source free this request's blocks."""
        runner, profile = self._runner, self._runner.engine.profile
        started_s = runner.now_s()
        reply = await connection.request(
            pull=fetch.source.request_id,
            engine_id=fetch.source.engine_id,
            blocks=fetch.remote_block_ids,
            bytes=fetch.kv_bytes,
        )
        digests = reply.get("digests")
        if not isinstance(digests, list):
            raise PullFailed(str(reply.get("error")))
        seconds = estimate_transfer_s(
            fetch.kv_bytes, link_bytes_per_s=profile.link_bytes_per_s, link_setup_s=profile.link_setup_s
        )
        seconds *= self.slow_factor
        now_s = runner.now_s()
        slot = self._ingress.reserve(seconds, now_s=now_s - seconds)
        await asyncio.sleep(max(0.0, slot.end_s - now_s))
        runner.metrics.record_transfer(
            bytes_moved=fetch.kv_bytes, seconds=runner.now_s() - started_s, post_s=profile.link_setup_s
        )
        await self._release_after_pull(connection, fetch.source)
        return tuple(map(bytes.fromhex, digests))

    async def _release_after_pull(self, connection: _SourceConnection, source: KvImportRequest) -> None:
        """Have the source free this request's blocks.

        A failure is counted and otherwise ignored: the source frees the blocks when the lease expires.
        """
        try:
            await connection.request(release=source.request_id)
        except (SideChannelError, OSError):
            self._runner.metrics.record_failed_notification()

    async def _send_heartbeats(self, connection: _SourceConnection, fetch: KvFetch) -> None:
        while True:
            await asyncio.sleep(self._runner.engine.heartbeat_interval_s)
            connection.send(heartbeat=fetch.source.request_id)

    async def _ensure_handshake(self, source: KvImportRequest) -> None:
        """Do the handshake with a new source, one new source at a time.

        Raises:
            PullFailed: if the source does not respond (after five seconds) or is another engine.
        """
        if source.engine_id in self._known_sources:
            return
        async with self._handshake_lock:
            if source.engine_id in self._known_sources:
                return
            started_s = self._runner.now_s()
            reply = await self._request_handshake(source)
            if reply is None:
                await asyncio.sleep(max(0.0, started_s + HANDSHAKE_TIMEOUT_S - self._runner.now_s()))
                raise PullFailed("no reply to the handshake")
            if reply.get("engine_id") != source.engine_id or reply.get("model") != self._model:
                raise PullFailed("the source is another engine than expected")
            due_s = started_s + self._runner.engine.profile.handshake_s
            await asyncio.sleep(max(0.0, due_s - self._runner.now_s()))
            self._known_sources.add(source.engine_id)

    async def _request_handshake(self, source: KvImportRequest) -> dict[str, Any] | None:
        """Return the source's reply to the handshake; None if it does not respond."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                connection = await _connect(source)
                with contextlib.closing(connection):
                    return await connection.request(handshake=self._model)
        except (SideChannelError, OSError, TimeoutError):
            return None

    async def _release_after_cancel(self, source: KvImportRequest) -> None:
        """Have the source, known or not, free the blocks of a request that ended. Failures are ignored."""
        with contextlib.suppress(SideChannelError, OSError, TimeoutError):
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                connection = await _connect(source)
                with contextlib.closing(connection):
                    await connection.request(release=source.request_id)
