"""The decode instance's end of the side channel: pulls blocks from the peer that the KV transfer parameters
name.

As on the real engine, the first contact with a peer is a handshake, handshakes run one after another, and an
unreachable peer delays all other first contacts by five seconds, while known peers are read meanwhile. If a
pull fails, the engine computes the prompt itself (`kv_load_failure_policy: recompute`).
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


class _Peer:
    """One connection to a prefill instance."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, **message: Any) -> None:
        """Send a message that has no reply."""
        self._writer.write(encode_message(message))

    async def request(self, **message: Any) -> dict[str, Any]:
        """Send a message and return the reply.

        Raises:
            SideChannelError: if the peer closes the connection or sends invalid data.
        """
        self.send(**message)
        reply = await read_message(self._reader)
        if reply is None:
            raise SideChannelError("closed by the peer")
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def _connect(source: KvImportRequest) -> _Peer:
    return _Peer(*await asyncio.open_connection(source.host, source.port, limit=MESSAGE_BYTES_MAX))


class SideChannelPuller:
    """Runs the pulls of one engine, each in its own task. Implements `runner.KvPuller`."""

    def __init__(self, runner: EngineRunner, *, model: str, lease_s: float) -> None:
        self._runner, self._model, self._lease_s = runner, model, lease_s
        self._ingress = LinkEnd()
        self._handshake_lock = asyncio.Lock()
        self._known_peers: set[str] = set()
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._notifications: set[asyncio.Task[None]] = set()
        self.pulls_to_fail = 0

    def start_pull(self, fetch: KvFetch, *, own_digest: bytes) -> None:
        """Start pulling blocks for the prompt with digest `own_digest`; report to the runner."""
        task = asyncio.get_running_loop().create_task(self._fetch(fetch, own_digest))
        self._pulls[fetch.request_id] = task
        task.add_done_callback(lambda _: self._pulls.pop(fetch.request_id, None))

    def cancel(self, request_id: str, source: KvImportRequest) -> None:
        """Stop pulling for a request that ended, and release the blocks of the prefill instance."""
        pull = self._pulls.get(request_id)
        if pull is not None:
            pull.cancel()
        if source.request_id is not None and source.block_ids is not None:
            notification = asyncio.get_running_loop().create_task(self._release_remote_blocks(source))
            self._notifications.add(notification)
            notification.add_done_callback(self._notifications.discard)

    async def close(self) -> None:
        """Cancel all pulls and notifications."""
        tasks = [*self._pulls.values(), *self._notifications]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, fetch: KvFetch, own_digest: bytes) -> None:
        try:
            digests = await asyncio.wait_for(self._pull(fetch), HANDSHAKE_TIMEOUT_S + self._lease_s)
        except (PullFailed, SideChannelError, OSError, TimeoutError):
            self._runner.fail_fetch(fetch.request_id)
        else:
            self._runner.complete_fetch(fetch.request_id, pulled_digest(digests, own_digest=own_digest))

    async def _pull(self, fetch: KvFetch) -> tuple[bytes, ...]:
        if self.pulls_to_fail > 0:
            self.pulls_to_fail -= 1
            raise PullFailed("injected fault")
        await self._ensure_handshake(fetch.source)
        peer = await _connect(fetch.source)
        heartbeats = asyncio.get_running_loop().create_task(self._send_heartbeats(peer, fetch))
        try:
            return await self._read_blocks(peer, fetch)
        finally:
            heartbeats.cancel()
            peer.close()

    async def _read_blocks(self, peer: _Peer, fetch: KvFetch) -> tuple[bytes, ...]:
        """Pull the blocks, wait for this end's link, then release the blocks of the prefill instance."""
        runner, profile = self._runner, self._runner.engine.profile
        started_s = runner.now_s()
        reply = await peer.request(
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
        now_s = runner.now_s()
        slot = self._ingress.reserve(seconds, now_s=now_s - seconds)
        await asyncio.sleep(max(0.0, slot.end_s - now_s))
        runner.metrics.record_transfer(
            bytes_moved=fetch.kv_bytes, seconds=runner.now_s() - started_s, post_s=profile.link_setup_s
        )
        await self._notify_pulled(peer, fetch.source)
        return tuple(map(bytes.fromhex, digests))

    async def _notify_pulled(self, peer: _Peer, source: KvImportRequest) -> None:
        """Release the blocks of the prefill instance.

        A failure is counted and otherwise ignored: the lease will expire.
        """
        try:
            await peer.request(release=source.request_id)
        except (SideChannelError, OSError):
            self._runner.metrics.record_failed_notification()

    async def _send_heartbeats(self, peer: _Peer, fetch: KvFetch) -> None:
        while True:
            await asyncio.sleep(self._runner.engine.heartbeat_interval_s)
            peer.send(heartbeat=fetch.source.request_id)

    async def _ensure_handshake(self, source: KvImportRequest) -> None:
        """Do the handshake with a new peer, one new peer at a time.

        Raises:
            PullFailed: if the peer does not respond (after five seconds) or is another engine.
        """
        if source.engine_id in self._known_peers:
            return
        async with self._handshake_lock:
            if source.engine_id in self._known_peers:
                return
            started_s = self._runner.now_s()
            reply = await self._request_handshake(source)
            if reply is None:
                await asyncio.sleep(max(0.0, started_s + HANDSHAKE_TIMEOUT_S - self._runner.now_s()))
                raise PullFailed("no reply to the handshake")
            if reply.get("engine_id") != source.engine_id or reply.get("model") != self._model:
                raise PullFailed("the peer is another engine than expected")
            due_s = started_s + self._runner.engine.profile.handshake_s
            await asyncio.sleep(max(0.0, due_s - self._runner.now_s()))
            self._known_peers.add(source.engine_id)

    async def _request_handshake(self, source: KvImportRequest) -> dict[str, Any] | None:
        """Return the peer's reply to the handshake; None if it does not respond."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                peer = await _connect(source)
                with contextlib.closing(peer):
                    return await peer.request(handshake=self._model)
        except (SideChannelError, OSError, TimeoutError):
            return None

    async def _release_remote_blocks(self, source: KvImportRequest) -> None:
        """Ask a prefill instance, known or not, to free the blocks of a request that ended."""
        with contextlib.suppress(SideChannelError, OSError, TimeoutError):
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                peer = await _connect(source)
                with contextlib.closing(peer):
                    await peer.request(release=source.request_id)
