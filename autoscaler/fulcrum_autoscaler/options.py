"""The command-line options of the autoscaler process, parsed and validated for `program`.

Thresholds and modes are not options: they are in each PDService (`policy.observation.AutoscalingRules`).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fulcrum_cluster.logs import add_log_level_option
from fulcrum_cluster.process import ArgumentParser, read_token_file
from fulcrum_core.errors import InvalidInput

IN_CLUSTER_ROUTER_STATE_URL = "http://{service}.{namespace}.svc:9091"
"""State port of a service's router in a cluster, through the router's Service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Validated options. A `port` of 0 lets the system choose a free one."""

    service: str | None
    """Name of the one service to manage; None manages every service of `namespace`."""
    namespace: str
    """Namespace of the managed services; "" is every namespace."""
    store: str
    """Address of the API objects: `unix:PATH`, `kubeconfig:[PATH][#CONTEXT]` or `in-cluster`."""
    router_state: str
    """URL of a router's state port; `{service}` and `{namespace}` are replaced for each service."""
    token_file: Path
    """File with the bearer token for state ports; read again for each request."""
    state_ca: Path | None
    """PEM file of the authorities of state ports' certificates; None: no port with TLS is trusted."""
    host: str
    port: int
    log_level: str

    def router_url(self, namespace: str, service: str) -> str:
        """Return the URL of the state port of a service's router."""
        return self.router_state.format(namespace=namespace, service=service)


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Parse and validate `arguments`; None parses the arguments of this process.

    Reads the token file, only to find out early whether it can be read.

    Raises:
        InvalidInput: if a value breaks a rule, or the token file is unreadable or empty.
        SystemExit: with code 2 and one line on stderr, if the arguments cannot be parsed.
    """
    parsed = _parser().parse_args(arguments)
    if not 0 <= parsed.port <= 65535:  # uvloop would bind the port modulo 2**16
        raise InvalidInput("--port", parsed.port, "is not between 0 and 65535")
    local = parsed.store.startswith("unix:")
    if parsed.router_state is None and local:
        raise InvalidInput("--router-state", "nothing", "is required in a local run")
    namespace = (
        parsed.namespace if parsed.namespace is not None else "" if parsed.service is None else "default"
    )
    options = Options(
        service=parsed.service,
        namespace=namespace,
        store=parsed.store,
        router_state=parsed.router_state or IN_CLUSTER_ROUTER_STATE_URL,
        token_file=parsed.token_file,
        state_ca=parsed.state_ca,
        host=parsed.host,
        port=parsed.port,
        log_level=parsed.log_level,
    )
    _check_url(options)
    read_token_file(parsed.token_file)  # checked here; read again for every request
    return options


def _check_url(options: Options) -> None:
    """Raise InvalidInput unless `router_state` gives a usable URL for every managed service."""
    try:
        parts = urlsplit(options.router_url("namespace", "service"))
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, KeyError, IndexError, AttributeError):
        is_valid = False
    if not is_valid:
        rule = "is not http://HOST:PORT; {service} and {namespace} are replaced for each service"
        raise InvalidInput("--router-state", options.router_state, rule)
    if options.service is None and "{service}" not in options.router_state:
        rule = "names one router for all services: pass --service, or use {service} in the URL"
        raise InvalidInput("--router-state", options.router_state, rule)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="fulcrum_autoscaler",
        description="Decides which instance serves prefill and which decode, and flips roles.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--service", help="name of the one PDService to manage (default: all)")
    add("--namespace", help="namespace of the managed services (with --service: default, else all)")
    add(
        "--store",
        required=True,
        help="address of the API objects: unix:PATH, kubeconfig:[PATH][#CONTEXT] or in-cluster",
    )
    add(
        "--router-state",
        help=f"URL of a router's state port ({IN_CLUSTER_ROUTER_STATE_URL.replace('%', '%%')})",
    )
    add(
        "--token-file",
        required=True,
        type=Path,
        help="file with the bearer token for state ports; read for every request",
    )
    add("--state-ca", type=Path, help="PEM file with the authorities of state ports with TLS")
    add_log_level_option(parser)
    add("--host", default="127.0.0.1", help="address to serve /decisions and /metrics on (%(default)s)")
    add("--port", default=0, type=int, help="port to serve them on; 0: any free port (%(default)s)")
    return parser
