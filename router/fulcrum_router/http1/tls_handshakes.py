"""TLS handshakes of clients: limited in number and time, since each holds a socket and memory.

asyncio's own server does handshakes before it makes a connection known, so a limit on those does not see
them. Here sockets are accepted one by one, and become `ClientConnection`s after their handshake. If too many
wait, the oldest one of the network that has most is aborted: a single network keeps out nobody else. Without
such a network, the oldest of all is. `server` and `control.limited_port` accept all TLS connections with it;
ports without TLS do not need it.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import structlog

from fulcrum_router.http1.limits import MAX_HANDSHAKES

log = structlog.get_logger()

ABORTED, FAILED = "aborted", "failed"
"""Reasons of failures."""

HANDSHAKE_TIMEOUT_S = 10.0
FAIR_SHARE = 1 / 16
"""Share of the handshakes that one network may have, when there are too many."""
_RETRY_ACCEPT_S = 0.1
"""Wait after a connection could not be accepted, as when the process has no more files."""

Source = tuple[str, str]
"""The site of a client (of IPv6 its network of 48 bits) and its address (of IPv6 its network of 64 bits)."""
_H = TypeVar("_H")


class TlsAcceptor:
    """Accepts connections, does their handshakes and makes their protocols.

    Args:
        context: Certificate and rules of the server.
        make_protocol: Makes the protocol of a connection after its handshake.
        max_handshakes: Handshakes at the same time.
        timeout_s: Seconds that one may take.
        failures: Counts handshakes that have failed, by reason: aborted for others, or failed themselves.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        max_handshakes: int = MAX_HANDSHAKES,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        failures: dict[str, int] | None = None,
    ) -> None:
        self._context, self._make_protocol = context, make_protocol
        self._max_handshakes, self._timeout_s = max_handshakes, timeout_s
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        """Handshakes, the oldest first."""
        self._sources: dict[asyncio.Task[None], Source] = {}
        """Address from which the connection of a handshake came, the oldest first."""
        self._failures = {} if failures is None else failures
        self._aborted = set[asyncio.Task[None]]()

    @property
    def failures(self) -> int:
        """Handshakes that failed, took too long or were aborted for others."""
        return sum(self._failures.values())

    @property
    def handshakes(self) -> int:
        """Handshakes that have not ended."""
        return len(self._tasks)

    async def run(self, bound: socket.socket) -> None:
        """Accept connections of a listening socket until cancelled; then abort the handshakes."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    accepted, address = await loop.sock_accept(bound)
                except OSError:
                    await asyncio.sleep(_RETRY_ACCEPT_S)
                    continue
                self._begin(accepted, find_source(address[0]))
        finally:
            for waiting in self._tasks.values():
                _shut_down(waiting)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, accepted: socket.socket, source: Source) -> None:
        if len(self._tasks) >= self._max_handshakes:
            self._abort_one()
        task = asyncio.get_running_loop().create_task(self._shake_hands(accepted))
        self._tasks[task] = accepted
        self._sources[task] = source
        task.add_done_callback(self._end)

    def _abort_one(self) -> None:
        task = choose_aborted(self._sources, fair=FAIR_SHARE * self._max_handshakes)
        self._aborted.add(task)
        _shut_down(self._tasks[task])
        self._forget(task)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._sources.pop(task, None)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._forget(task)
        error = task.exception()
        if error is not None:
            reason = ABORTED if task in self._aborted else FAILED
            self._failures[reason] = self._failures.get(reason, 0) + 1
        self._aborted.discard(task)
        if error is not None and not isinstance(error, OSError):  # ssl.SSLError and TimeoutError are OSErrors
            log.error("handshake failed because of an internal error", exc_info=error)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(
            self._make_protocol, accepted, ssl=self._context, ssl_handshake_timeout=self._timeout_s
        )


def choose_aborted(sources: Mapping[_H, Source], *, fair: float) -> _H:
    """Choose the handshake that gives way, of those with these sources, the oldest first.

    The oldest of the address that has most in the site that has most. If that site has no more than `fair`,
    the oldest of all.
    """
    site, count = Counter(site for site, _ in sources.values()).most_common(1)[0]
    if count <= fair:
        return next(iter(sources))
    largest = Counter(source for source in sources.values() if source[0] == site).most_common(1)[0][0]
    return next(handshake for handshake, source in sources.items() if source == largest)


def find_source(address: str) -> Source:
    """Return the parts of a client's address that a client, and a site with many of them, cannot vary."""
    if ":" not in address:
        return address, address
    network = ipaddress.IPv6Address(address.partition("%")[0])
    if network.ipv4_mapped is not None:
        return str(network.ipv4_mapped), str(network.ipv4_mapped)
    return network.packed[:6].hex(), network.packed[:8].hex()


def _shut_down(accepted: socket.socket) -> None:
    """Have a handshake fail. To cancel it instead would leave uvloop's transport open."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
