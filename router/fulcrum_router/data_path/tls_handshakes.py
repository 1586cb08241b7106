"""TLS handshakes of clients: limited in number and time, since each holds a socket and memory.

asyncio's own server does handshakes before it makes a connection known, so a limit on those does not see
them. Here sockets are accepted one by one, and become `ClientConnection`s after their handshake. If too many
wait, the oldest is aborted: a client that goes on is done within milliseconds.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

import structlog

log = structlog.get_logger()

HANDSHAKE_TIMEOUT_S = 10.0
MAX_HANDSHAKES = 512
_RETRY_ACCEPT_S = 0.1
"""Wait after a connection could not be accepted, as when the process has no more files."""


class TlsAcceptor:
    """Accepts connections, does their handshakes and makes their protocols.

    Args:
        context: Certificate and rules of the server.
        make_protocol: Makes the protocol of a connection after its handshake.
        max_handshakes: Handshakes at the same time.
        timeout_s: Seconds that one may take.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        max_handshakes: int = MAX_HANDSHAKES,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._context, self._make_protocol = context, make_protocol
        self._max_handshakes, self._timeout_s = max_handshakes, timeout_s
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        """Handshakes, the oldest first."""
        self.failures = 0
        """Handshakes that failed, took too long or were aborted for others."""

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
                    accepted, _ = await loop.sock_accept(bound)
                except OSError:
                    await asyncio.sleep(_RETRY_ACCEPT_S)
                    continue
                self._begin(accepted)
        finally:
            for waiting in self._tasks.values():
                _shut_down(waiting)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, accepted: socket.socket) -> None:
        if len(self._tasks) >= self._max_handshakes:
            _shut_down(self._tasks.pop(next(iter(self._tasks))))
        task = asyncio.get_running_loop().create_task(self._shake_hands(accepted))
        self._tasks[task] = accepted
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        error = task.exception()
        self.failures += error is not None
        if error is not None and not isinstance(error, OSError):  # ssl.SSLError and TimeoutError are OSErrors
            log.error("handshake failed because of an internal error", exc_info=error)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(
            self._make_protocol, accepted, ssl=self._context, ssl_handshake_timeout=self._timeout_s
        )


def _shut_down(accepted: socket.socket) -> None:
    """Have a handshake fail. To cancel it instead would leave uvloop's transport open."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
