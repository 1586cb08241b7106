"""An API server as kubectl reaches it, read by the `kubernetes` library: the one place that imports it.

The library is asked for what is tedious and settled: merged files, contexts, certificates in files or inline,
tokens, exec plugins. It is big, so pods, which need none of this, never load it.
"""

import asyncio
import contextlib
import logging
import ssl
import tempfile
from collections.abc import Iterator
from typing import Any

import yaml

from fulcrum_cluster.access import Access
from fulcrum_core.errors import InvalidInput

_BROKEN = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)  # what the library raises over a broken file


def read_kubeconfig(path: str | None, context: str | None, *, address: str) -> Access:
    """The way that a context of a kubeconfig says, or `InvalidInput` in one line."""
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        raise InvalidInput("--store", address, "needs the package's extra: fulcrum[kubernetes]") from error
    library: Any = config  # it has no types
    configuration = client.Configuration()
    try:
        # The library writes inline certificates and keys to files, and leaves them there if it is killed.
        with tempfile.TemporaryDirectory() as folder, _complaints() as said:
            contexts, active = library.list_kube_config_contexts(path)
            library.load_kube_config(
                path, context, configuration, persist_config=False, temp_file_path=folder
            )
            tls = _tls(configuration)
    except (library.ConfigException, yaml.YAMLError, OSError, *_BROKEN) as error:
        rule = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput("--store", address, f"cannot be read as a kubeconfig: {rule}") from error
    if said:
        raise InvalidInput("--store", address, f"gives no credentials: {said[0]}")
    chosen = next((item for item in contexts if item["name"] == context), active)
    return Access(
        url=configuration.host,
        tls=tls,
        token=_ConfiguredToken(configuration) if configuration.api_key else None,
        server_name=configuration.tls_server_name,
        proxy=configuration.proxy,
        namespace=chosen["context"].get("namespace") or "default",
    )


class _ConfiguredToken:
    """The token that the library holds, renewed by it when it ends."""

    def __init__(self, configuration: Any) -> None:
        self._configuration = configuration

    async def header(self) -> str | None:
        """The header. In a thread: an exec plugin is a program that may take its time."""
        return await asyncio.to_thread(self._configuration.get_api_key_with_prefix, "BearerToken")

    def refused(self) -> None:
        """Nothing to do: the library renews what its plugin dated, and what is not dated stays."""


def _tls(configuration: Any) -> ssl.SSLContext | None:
    if not configuration.host.startswith("https"):
        return None
    tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        tls.load_cert_chain(configuration.cert_file, configuration.key_file)
    return tls


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """What the library logs as an error instead of raising it: an exec plugin that failed."""
    said: list[str] = []

    class _Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(" ".join(record.getMessage().split()))

    root, listener = logging.getLogger(), _Listener(logging.ERROR)
    others = root.handlers
    root.handlers = [listener]
    try:
        yield said
    finally:
        root.handlers = others
