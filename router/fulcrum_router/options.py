"""What a router is started with."""

import argparse
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fulcrum_cluster.process import ArgumentParser
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import Role
from fulcrum_router.fleet.instances import parse_endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """One router. A port of 0 lets the system choose."""

    service: str
    namespace: str
    host: str
    port: int
    state_port: int
    token: str | None
    """Of the state port in a local run."""
    state_callers: tuple[str, ...]
    """ServiceAccounts that may call the state port in a cluster. Neither: there is no state port."""
    store: str | None
    static: tuple[tuple[Role, str, int], ...]
    """Fixed endpoints instead of a store."""
    lease: str | None = None
    """Name of Lease and EndpointSlice, where several routers take turns; then who and where this one is:"""
    identity: str = ""
    advertise_address: str = ""

    @property
    def has_state_port(self) -> bool:
        """Whether there is somebody who may call it."""
        return self.token is not None or bool(self.state_callers)


def parse_options(arguments: Sequence[str] | None) -> RouterOptions:
    """The options in `arguments` (None: the command line's).

    Raises:
        InvalidInput: for a value that breaks a rule.
        SystemExit: code 2 and one line on stderr for arguments that cannot be parsed.
    """
    given = _build_parser().parse_args(arguments)
    if (given.store is None) == (given.static is None):
        raise InvalidInput(
            "--store", given.store or "nothing", "is required, unless --static is given in its place"
        )
    if given.store is not None and (given.token_file is None) == (given.state_callers is None):
        both = "both" if given.token_file is not None else "nothing"
        raise InvalidInput("--token-file", both, "or --state-callers, one of them, is required with --store")
    _check_cluster_options(given)
    for name, port in (("--port", given.port), ("--state-port", given.state_port)):
        if not 0 <= port <= 65535:
            raise InvalidInput(name, port, "is not between 0 and 65535")
    return RouterOptions(
        service=given.service,
        namespace=given.namespace,
        host=given.host,
        port=given.port,
        state_port=given.state_port,
        token=None if given.token_file is None else _read_token(given.token_file),
        state_callers=_parse_subjects(given.state_callers),
        store=given.store,
        static=tuple(_parse_endpoints(given.static or ())),
        lease=given.lease,
        identity=given.identity or "",
        advertise_address=given.advertise_address or "",
    )


def _check_cluster_options(given: argparse.Namespace) -> None:
    """What only has a meaning in a cluster, and goes together there."""
    local = given.store is None or given.store.startswith("unix:")
    for name in ("state_callers", "lease", "identity", "advertise_address"):
        value, option = getattr(given, name), f"--{name.replace('_', '-')}"
        if value is not None and local:
            raise InvalidInput(option, value, "has a meaning in a cluster only")
        if name in ("identity", "advertise_address") and bool(value) is not bool(given.lease):
            raise InvalidInput(option, value or "nothing", "and --lease go together")
    if given.advertise_address:
        try:
            ipaddress.ip_address(given.advertise_address)
        except ValueError:
            raise InvalidInput(
                "--advertise-address", given.advertise_address, "is not an IP address"
            ) from None


def _parse_subjects(text: str | None) -> tuple[str, ...]:
    subjects = () if text is None else tuple(text.split(","))
    for subject in subjects:
        parts = subject.split(":")
        if len(parts) != 4 or parts[:2] != ["system", "serviceaccount"] or not all(parts):
            raise InvalidInput("--state-callers", subject, "is not system:serviceaccount:NAMESPACE:NAME")
    return subjects


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise InvalidInput("--token-file", path, f"cannot be read: {reason.lower()}") from error
    if not token:
        raise InvalidInput("--token-file", path, "is empty")
    return token


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
        prog="fulcrum_router", description="Routes one service's requests.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--service", default="static", help="name of the PDService")
    add("--namespace", default="default", help="its namespace (%(default)s)")
    add("--store", help="where the objects are: unix:PATH, kubeconfig:[PATH][#CONTEXT] or in-cluster")
    add(
        "--static",
        nargs="+",
        metavar="ROLE=HOST:PORT,…",
        help="fixed endpoints in place of a store, to measure the data path",
    )
    add("--host", default="127.0.0.1", help="address of both ports (%(default)s)")
    add("--port", type=int, default=0, help="port for clients; 0: any (%(default)s)")
    add("--state-port", type=int, default=0, help="port for the state; 0: any (%(default)s)")
    add(
        "--token-file", type=Path, help="file with the state port's token; without one there is no state port"
    )
    add("--state-callers", metavar="SUBJECT,…", help="ServiceAccounts that may call the state port")
    add("--lease", help="name of the Lease and the EndpointSlice by which several routers take turns")
    add("--identity", help="with --lease: the name of this router, its pod's")
    add("--advertise-address", help="with --lease: the IP address at which clients reach this router")
    return parser
