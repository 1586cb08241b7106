"""Reads kubectl's kubeconfig files with the `kubernetes` library; only this module imports that library.

The library merges files and handles contexts, certificates, tokens and exec plugins. It takes 60 MB, so
`client` imports this module only for `kubeconfig:` addresses, never in a pod.
"""

import asyncio
import contextlib
import logging
import ssl
import tempfile
from collections.abc import Iterator
from typing import Any

import yaml

from fulcrum_cluster.client_config import ClientConfig
from fulcrum_core.errors import InvalidInput

_LIBRARY_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)  # raised by the library for a broken file


def read_kubeconfig(path: str | None, context: str | None, *, address: str) -> ClientConfig:
    """Read a context of a kubeconfig.

    Raises:
        InvalidInput: if the file or the context cannot be used.
    """
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        raise InvalidInput("--store", address, "needs the package's extra: fulcrum[kubernetes]") from error
    library: Any = config  # it has no types
    configuration = client.Configuration()
    try:
        # The library writes inline certificates and keys to files, and leaves them there if it is killed.
        with tempfile.TemporaryDirectory() as folder, _capture_logged_errors() as errors:
            contexts, active = library.list_kube_config_contexts(path)
            library.load_kube_config(
                path, context, configuration, persist_config=False, temp_file_path=folder
            )
            tls = _tls(configuration)
    except (library.ConfigException, yaml.YAMLError, OSError, *_LIBRARY_ERRORS) as error:
        rule = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput("--store", address, f"cannot be read as a kubeconfig: {rule}") from error
    if errors:
        raise InvalidInput("--store", address, f"returns no credentials: {errors[0]}")
    chosen = next((item for item in contexts if item["name"] == context), active)
    return ClientConfig(
        url=configuration.host,
        tls=tls,
        token=KubeconfigToken(configuration) if configuration.api_key else None,
        server_name=configuration.tls_server_name,
        proxy=configuration.proxy,
        namespace=chosen["context"].get("namespace") or "default",
    )


class KubeconfigToken:
    """The kubeconfig's token, which the library renews before it expires."""

    def __init__(self, configuration: Any) -> None:
        self._configuration = configuration

    async def authorization_header(self) -> str | None:
        """The Authorization header, or None. Read in a thread, because an exec plugin may be slow."""
        return await asyncio.to_thread(self._configuration.get_api_key_with_prefix, "BearerToken")

    def invalidate(self) -> None:
        """Do nothing: the library renews tokens with an expiry date, and others cannot be renewed."""


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
def _capture_logged_errors() -> Iterator[list[str]]:
    """Collect errors that the library logs instead of raising, such as a failed exec plugin."""
    errors: list[str] = []

    class _ErrorCollector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(" ".join(record.getMessage().split()))

    root, collector = logging.getLogger(), _ErrorCollector(logging.ERROR)
    others = root.handlers
    root.handlers = [collector]
    try:
        yield errors
    finally:
        root.handlers = others
