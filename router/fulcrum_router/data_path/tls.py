"""TLS on the clients' port and the state port: certificates, read again when their files change.

cert-manager and the kubelet replace the files of a Secret; connections that are made later get the new
certificate, open ones go on.

`options` names the files, `server` makes the contexts and has them read again.
"""

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

import structlog

from fulcrum_core.errors import InvalidInput

log = structlog.get_logger()

RELOAD_INTERVAL_S = 30.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the certificate, with its chain, and of its key; and the option that names the first."""

    certificate: Path
    key: Path
    option: str = "--tls-certificate"

    def read_versions(self) -> tuple[float, float]:
        """Modification times of both files; raises OSError if one cannot be read."""
        return self.certificate.stat().st_mtime, self.key.stat().st_mtime


def make_tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Make the context of a server with this certificate: TLS 1.2 or later, HTTP/1.1.

    Raises:
        InvalidInput: if certificate and key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise InvalidInput(files.option, files.certificate, f"cannot be used: {reason}") from error
    return context


async def reload_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Use a new certificate soon after its files have changed, until cancelled."""
    known = files.read_versions()
    while True:
        await asyncio.sleep(RELOAD_INTERVAL_S)
        try:
            versions = files.read_versions()
            if versions != known:
                make_tls_context(files)  # raises if they do not belong together, before `context` changes
                context.load_cert_chain(files.certificate, files.key)
                known = versions
                log.info("certificate read again", file=str(files.certificate))
        except (OSError, InvalidInput) as error:  # the files are being replaced: tried again
            log.warning("cannot read the certificate; using the one before", reason=str(error))
