"""How to reach a store and as whom: from `--store` to an address, a TLS context and a bearer token.

unix:PATH                    the socket of a local run
kubeconfig:[PATH][#CONTEXT]  an API server as kubectl reaches it; without a path, kubectl's own default
in-cluster                   the API server of the cluster that this pod runs in
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
_TOKEN_AGE_S = 60.0  # the kubelet writes a new one long before the old one ends


class TokenSource(Protocol):
    """Where the bearer token comes from."""

    async def authorization_header(self) -> str | None:
        """The Authorization header of the next request, or None."""
        ...

    def invalidate(self) -> None:
        """The server did not take it (401): look again before the next request."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """One way to a store.

    Attributes:
        url: Base of all addresses.
        socket: The unix socket to connect to, if any.
        tls: How the server proves itself, and this client if by certificate.
        token: Who asks, if by token.
        server_name: The name in the server's certificate, where it is not the host's.
        proxy: An HTTP proxy on the way.
        namespace: The namespace meant where a user names none.
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
        """What to call it in a message."""
        return self.url if self.socket is None else str(self.socket)


def resolve_client_config(address: str) -> ClientConfig:
    """The way that a `--store` address says, or `InvalidInput`."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return ClientConfig(url="http://fulcrum", socket=Path(rest))
    if scheme == "kubeconfig" and address != scheme:
        from fulcrum_cluster.kubeconfig import read_kubeconfig  # 60 MB that a pod never needs

        path, _, context = rest.partition("#")
        return read_kubeconfig(path or None, context or None, address=address)
    if address == "in-cluster":
        return in_cluster_config()
    raise InvalidInput(
        "--store", address, "is not unix: and a path, nor kubeconfig:[PATH][#CONTEXT], nor in-cluster"
    )


def in_cluster_config(
    *, folder: Path = SERVICE_ACCOUNT_FOLDER, environment: Mapping[str, str] = os.environ
) -> ClientConfig:
    """The way from a pod, by its ServiceAccount's mounted files; `InvalidInput` outside of one."""
    host, port = (environment.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not port:
        raise InvalidInput("--store", "in-cluster", "is for pods: KUBERNETES_SERVICE_HOST is not set")
    token = ServiceAccountToken(folder / "token")
    try:
        token.read()
        namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    except OSError as error:  # an SSLError is one, too
        rule = f"needs a mounted ServiceAccount: {error.filename or folder / 'ca.crt'}: {error.strerror}"
        raise InvalidInput("--store", "in-cluster", rule) from error
    host = f"[{host}]" if ":" in host else host
    return ClientConfig(url=f"https://{host}:{port}", tls=tls, token=token, namespace=namespace)


class ServiceAccountToken:
    """A ServiceAccount's token in a file, which is written anew while the pod runs."""

    def __init__(self, path: Path, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._path, self._monotonic_s = path, monotonic_s
        self._header, self._read_at_s = "", -_TOKEN_AGE_S

    def read(self) -> None:
        """Read the file now, or `OSError`."""
        self._header = f"Bearer {self._path.read_text(encoding='utf-8').strip()}"
        self._read_at_s = self._monotonic_s()

    async def authorization_header(self) -> str:
        """The header, from the file at least once a minute."""
        if self._monotonic_s() - self._read_at_s >= _TOKEN_AGE_S:
            self.read()
        return self._header

    def invalidate(self) -> None:
        """Read the file again before the next request."""
        self._read_at_s = self._monotonic_s() - _TOKEN_AGE_S
