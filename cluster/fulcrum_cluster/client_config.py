"""Address, TLS context and bearer token of a store, and where a pod finds those of its own API server.

`client.resolve_client_config` chooses by the value of `--store`; `kubeconfig` reads kubectl's files. Nothing
is connected here.
"""

import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fulcrum_core.errors import InvalidInput

SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_AGE_S = 60.0  # the kubelet replaces the token long before it expires


class TokenSource(Protocol):
    """Source of a bearer token."""

    async def authorization_header(self) -> str | None:
        """The Authorization header of the next request, or None."""
        ...

    def invalidate(self) -> None:
        """Fetch a new token before the next request: the server refused the last one with 401."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Everything that a client needs to connect to a store.

    Attributes:
        url: Base URL of all requests.
        socket: Unix socket to connect to instead of the URL's host.
        tls: TLS context: the trusted authorities, and the client certificate if there is one.
        token: Source of the bearer token; None: no Authorization header.
        server_name: Name expected in the server's certificate, if it differs from the URL's host.
        proxy: URL of an HTTP proxy.
        namespace: Namespace used when a user names none.
    """

    url: str
    socket: Path | None = None
    tls: ssl.SSLContext | None = None
    token: TokenSource | None = None
    server_name: str | None = None
    proxy: str | None = None
    namespace: str = "default"

    @property
    def display_name(self) -> str:
        """Address of the store for messages: the socket's path or the URL."""
        return self.url if self.socket is None else str(self.socket)


def in_cluster_config(
    *, folder: Path = SERVICE_ACCOUNT_FOLDER, environment: Mapping[str, str] = os.environ
) -> ClientConfig:
    """Read the ServiceAccount's files that the kubelet mounts into a pod.

    Raises:
        InvalidInput: outside a pod, or if the pod mounts no ServiceAccount.
    """
    host, port = (environment.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not port:
        raise InvalidInput("--store", "in-cluster", "works only in a pod: KUBERNETES_SERVICE_HOST is not set")
    token = ServiceAccountToken(folder / "token")
    try:
        token.read()
        namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    except OSError as error:  # includes ssl.SSLError
        rule = f"needs a mounted ServiceAccount: {error.filename or folder / 'ca.crt'}: {error.strerror}"
        raise InvalidInput("--store", "in-cluster", rule) from error
    host = f"[{host}]" if ":" in host else host
    return ClientConfig(url=f"https://{host}:{port}", tls=tls, token=token, namespace=namespace)


class ServiceAccountToken:
    """A ServiceAccount's token in a file that the kubelet replaces while the pod runs."""

    def __init__(self, path: Path, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._path, self._monotonic_s = path, monotonic_s
        self._header, self._read_at_s = "", -_TOKEN_AGE_S

    def read(self) -> None:
        """Read the file now.

        Raises:
            OSError: if the file cannot be read.
        """
        self._header = f"Bearer {self._path.read_text(encoding='utf-8').strip()}"
        self._read_at_s = self._monotonic_s()

    async def authorization_header(self) -> str:
        """The Authorization header; the file is read again when its last reading is a minute old."""
        if self._monotonic_s() - self._read_at_s >= _TOKEN_AGE_S:
            self.read()
        return self._header

    def invalidate(self) -> None:
        """Read the file again before the next request."""
        self._read_at_s = self._monotonic_s() - _TOKEN_AGE_S
