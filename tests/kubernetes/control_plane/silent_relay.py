"""A relay to the API server whose open connections can fall silent, as behind a broken load balancer."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator


class SilentRelay:
    """Relays one port; after `fall_silent` it delivers nothing more on the connections that are open then."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._silent: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._peers) // 2

    def fall_silent(self) -> int:
        """Stop delivering on all open connections; returns their number."""
        with self._lock:
            self._silent |= set(self._peers)
            return len(self._silent) // 2

    def hang_up(self) -> None:
        """Close the silent connections, so that clients can close their side of them."""
        with self._lock:
            while self._silent:
                one = next(iter(self._silent))
                self._end(one, self._peers[one])

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._thread.join()
        for each in (self._listener, *self._peers):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=0.05):
                with self._lock:
                    self._handle(key.fileobj)  # type: ignore[arg-type]

    def _handle(self, ready: socket.socket) -> None:
        if ready is self._listener:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            for one, other in ((client, server), (server, client)):
                self._peers[one] = other
                self._selector.register(one, selectors.EVENT_READ)
            return
        if ready not in self._peers:  # closed after `select` returned: with its peer, or by `hang_up`
            return
        try:
            data = ready.recv(65536)
        except OSError:
            data = b""
        peer = self._peers[ready]
        if not data:
            self._end(ready, peer)
        elif ready not in self._silent:
            with contextlib.suppress(OSError):
                peer.sendall(data)

    def _end(self, *pair: socket.socket) -> None:
        for each in pair:
            self._selector.unregister(each)
            self._peers.pop(each)
            self._silent.discard(each)
            each.close()


@contextlib.contextmanager
def silent_relay(target: tuple[str, int]) -> Iterator[SilentRelay]:
    """A relay during the block."""
    relay = SilentRelay(target)
    try:
        yield relay
    finally:
        relay.close()
