"""Client of a test cluster's API server, with administrator permissions and kept-alive connections.

Tests look many times a second. A connection of its own for each look would cost both sides a TLS handshake,
which is most of what such a request costs.

`cluster` and the tests ask with it; Fulcrum's programs use their own client.
"""

import contextlib
import http.client
import ssl
from pathlib import Path

RESPONSE_TIMEOUT_S = 5.0
_CONNECTION_CLOSED_ERRORS = (
    http.client.RemoteDisconnected,
    http.client.CannotSendRequest,
    BrokenPipeError,
    ConnectionResetError,
)


class AdminApi:
    """The API server of the cluster in a folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: list[http.client.HTTPSConnection] = []

    def request(self, method: str, path: str, body: bytes, *, content_type: str) -> tuple[int, bytes]:
        """Return status and body of the response; OSError or HTTPException if there is none.

        Connections are kept for what changes nothing: where one turns out to be closed, it is asked again.
        """
        is_read = method == "GET"
        while is_read and self._idle:
            with contextlib.suppress(
                IndexError, *_CONNECTION_CLOSED_ERRORS
            ):  # another thread may have taken the connection
                return self._send(self._idle.pop(), method, path, body, content_type, keep=True)
        return self._send(self._connect(), method, path, body, content_type, keep=is_read)

    def close(self) -> None:
        """Close the idle connections; a later request connects again."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()

    def _send(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        body: bytes,
        content_type: str,
        *,
        keep: bool,
    ) -> tuple[int, bytes]:
        try:
            connection.request(method, path, body or None, {"Content-Type": content_type})
            response = connection.getresponse()
            status_and_body = response.status, response.read()
        except BaseException:
            connection.close()
            raise
        if keep and not response.will_close:
            self._idle.append(connection)
        else:
            connection.close()
        return status_and_body

    def _connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=self._folder / "pki/ca.crt")
        context.load_cert_chain(self._folder / "pki/admin.crt", self._folder / "pki/admin.key")
        port = int((self._folder / "port").read_text())
        return http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=RESPONSE_TIMEOUT_S)
