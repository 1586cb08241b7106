"""Command line of the router: parse and check its options, for `__main__`.

It opens no port. What a service decides about its routers is in its PDService instead: see `settings`.
"""

import argparse
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fulcrum_cluster.logs import add_log_level_option
from fulcrum_cluster.process import ArgumentParser, read_token_file
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import Role
from fulcrum_router.data_path.tls import TlsFiles
from fulcrum_router.fleet.instances import parse_endpoint

_NOT_GIVEN = "not given"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Options of one router. Port 0: the system chooses a free port."""

    service: str
    namespace: str
    host: str
    """Address on which all ports listen."""
    port: int
    state_port: int
    metrics_port: int
    log_level: str
    token: str | None
    """Token of the state port in a local run."""
    state_callers: tuple[str, ...]
    """ServiceAccounts that may call the state port in a cluster."""
    store: str | None
    """Address of the store; None: `static` is used."""
    static: tuple[tuple[Role, str, int], ...]
    """Fixed endpoints with their roles, instead of a store."""
    tls: TlsFiles | None = None
    """Certificate of the clients' port; None: plain HTTP."""
    state_tls: TlsFiles | None = None
    """Certificate of the state port; None: plain HTTP."""
    api_keys: Path | None = None
    """Folder with the API keys of clients; None: none."""
    lease: str | None = None
    """Name of the Lease and the EndpointSlice with which several routers elect one; None: a single router."""
    identity: str = ""
    """Name of this router's pod, with `lease`."""
    advertise_address: str = ""
    """IP address at which clients reach this router, with `lease`."""

    @property
    def has_state_port(self) -> bool:
        """Whether the state port is opened: only if some caller can authenticate."""
        return self.token is not None or bool(self.state_callers)


def parse_options(arguments: Sequence[str] | None) -> RouterOptions:
    """Parse `arguments`; None: the process's own.

    Raises:
        InvalidInput: for a value that breaks a rule.
        SystemExit: code 2 and one line on stderr for arguments that cannot be parsed.
    """
    given = _build_parser().parse_args(arguments)
    _check_sources(given)
    _check_cluster_options(given)
    ports = {
        "--port": given.port,
        "--state-port": given.state_port,
        "--metrics-port": given.metrics_port,
    }
    for name, port in ports.items():
        if not 0 <= port <= 65535:
            raise InvalidInput(name, port, "is not between 0 and 65535")
    return RouterOptions(
        service=given.service,
        namespace=given.namespace,
        host=given.host,
        port=given.port,
        state_port=given.state_port,
        metrics_port=given.metrics_port,
        log_level=given.log_level,
        token=None if given.token_file is None else read_token_file(given.token_file),
        state_callers=_parse_subjects(given.state_callers),
        store=given.store,
        static=tuple(_parse_endpoints(given.static or ())),
        tls=_parse_tls("--tls", given.tls_certificate, given.tls_key),
        state_tls=_parse_tls("--state-tls", given.state_tls_certificate, given.state_tls_key),
        api_keys=given.api_keys,
        lease=given.lease,
        identity=given.identity or "",
        advertise_address=given.advertise_address or "",
    )


def _check_sources(given: argparse.Namespace) -> None:
    """Check that exactly one source of endpoints and, with a store, one way to authenticate is given."""
    if given.store is None and given.static is None:
        raise InvalidInput("--store", _NOT_GIVEN, "is required, unless --static is given")
    if given.store is not None and given.static is not None:
        raise InvalidInput("--store", given.store, "cannot be combined with --static")
    if given.store is not None and given.token_file is None and given.state_callers is None:
        raise InvalidInput("--token-file", _NOT_GIVEN, "or --state-callers is required with --store")
    if given.store is not None and given.token_file is not None and given.state_callers is not None:
        raise InvalidInput("--token-file", given.token_file, "cannot be combined with --state-callers")


def _check_cluster_options(given: argparse.Namespace) -> None:
    """Check the options that are valid in a cluster only, and those that --lease requires."""
    local = given.store is None or given.store.startswith("unix:")
    of_election = {"--identity": given.identity, "--advertise-address": given.advertise_address}
    for option, value in {
        "--state-callers": given.state_callers,
        "--lease": given.lease,
        **of_election,
    }.items():
        if value is not None and local:
            raise InvalidInput(option, value, "is valid in a cluster only")
    for option, value in of_election.items():
        if given.lease and not value:
            raise InvalidInput(option, _NOT_GIVEN, "is required with --lease")
        if value and not given.lease:
            raise InvalidInput(option, value, "is valid with --lease only")
    if given.advertise_address:
        try:
            ipaddress.ip_address(given.advertise_address)
        except ValueError:
            raise InvalidInput(
                "--advertise-address", given.advertise_address, "is not an IP address"
            ) from None


def _parse_tls(prefix: str, certificate: Path | None, key: Path | None) -> TlsFiles | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        option = f"{prefix}-key" if key is None else f"{prefix}-certificate"
        raise InvalidInput(option, _NOT_GIVEN, "is required with the other option for TLS")
    return TlsFiles(certificate, key, f"{prefix}-certificate")


def _parse_subjects(text: str | None) -> tuple[str, ...]:
    subjects = () if text is None else tuple(text.split(","))
    for subject in subjects:
        parts = subject.split(":")
        if len(parts) != 4 or parts[:2] != ["system", "serviceaccount"] or not all(parts):
            raise InvalidInput("--state-callers", subject, "is not system:serviceaccount:NAMESPACE:NAME")
    return subjects


def _parse_endpoints(groups: Sequence[str]) -> list[tuple[Role, str, int]]:
    found: list[tuple[Role, str, int]] = []
    for group in groups:
        name, _, endpoints = group.partition("=")
        role = {"prefill": Role.PREFILL, "decode": Role.DECODE}.get(name)
        if role is None or not endpoints:
            raise InvalidInput("--static", group, "is not prefill=HOST:PORT,… or decode=HOST:PORT,…")
        for endpoint in endpoints.split(","):
            try:
                found.append((role, *parse_endpoint(endpoint)))
            except ValueError:
                raise InvalidInput("--static", endpoint, "is not HOST:PORT") from None
    return found


def _build_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="fulcrum_router", description="Routes the requests of one service.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--service", default="static", help="name of the PDService (%(default)s)")
    add("--namespace", default="default", help="namespace of the PDService (%(default)s)")
    add("--store", help="store of the objects: unix:PATH, kubeconfig:[PATH][#CONTEXT] or in-cluster")
    add(
        "--static",
        nargs="+",
        metavar="ROLE=HOST:PORT,…",
        help="fixed endpoints instead of a store, to measure the data path",
    )
    add_log_level_option(parser)
    add("--host", default="127.0.0.1", help="address on which all ports listen (%(default)s)")
    add("--port", type=int, default=0, help="port for clients; 0: any free port (%(default)s)")
    add(
        "--state-port",
        type=int,
        default=0,
        help="port on which operator and autoscaler read the router's state; 0: any free port (%(default)s)",
    )
    add(
        "--metrics-port",
        type=int,
        default=0,
        help="port with Prometheus metrics at /metrics, without a token; 0: any free port (%(default)s)",
    )
    add("--tls-certificate", type=Path, help="PEM file: serve clients with TLS by this certificate and chain")
    add("--tls-key", type=Path, help="PEM file with the key of --tls-certificate")
    add("--state-tls-certificate", type=Path, help="PEM file: serve the state port with TLS")
    add("--state-tls-key", type=Path, help="PEM file with the key of --state-tls-certificate")
    add("--api-keys", type=Path, help="folder of a mounted Secret: a file of SHA-256 digests for each tenant")
    add("--token-file", type=Path, help="file with the token of the state port, in a local run")
    add(
        "--state-callers",
        metavar="SUBJECT,…",
        help="ServiceAccounts that may call the state port, in a cluster",
    )
    add("--lease", help="name of the Lease and the EndpointSlice with which several routers elect one")
    add("--identity", help="with --lease: name of this router's pod")
    add("--advertise-address", help="with --lease: IP address at which clients reach this router")
    return parser
