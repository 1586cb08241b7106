"""What an autoscaler is started with."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fulcrum_cluster.process import ArgumentParser
from fulcrum_core.errors import InvalidInput

IN_CLUSTER_ROUTER_STATE_URL = "http://{service}.{namespace}.svc:9091"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One autoscaler. A port of 0 lets the system choose."""

    service: str | None
    """The one service it acts on; None: every one that it sees."""
    namespace: str
    """Where; "" is every namespace."""
    store: str
    router_state: str
    """A URL, in which `{service}` and `{namespace}` stand for those of each service."""
    token_file: Path
    host: str
    port: int

    def router_url(self, namespace: str, service: str) -> str:
        """The URL of a service's state port."""
        return self.router_state.format(namespace=namespace, service=service)


def parse_options(arguments: Sequence[str] | None) -> Options:
    """The options in `arguments` (None: the command line's).

    Raises:
        InvalidInput: for a value that breaks a rule.
        SystemExit: code 2 and one line on stderr for arguments that cannot be parsed.
    """
    parsed = _parser().parse_args(arguments)
    if not 0 <= parsed.port <= 65535:  # uvloop would bind what is left of it in 16 bits
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
        host=parsed.host,
        port=parsed.port,
    )
    _check_url(options)
    _check_token(parsed.token_file)
    return options


def _check_url(options: Options) -> None:
    """A URL that leads somewhere, for every service."""
    try:
        parts = urlsplit(options.router_url("namespace", "service"))
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, KeyError, IndexError, AttributeError):
        is_valid = False
    if not is_valid:
        rule = "is not http://HOST:PORT, with {service} and {namespace} for those of each service"
        raise InvalidInput("--router-state", options.router_state, rule)
    if options.service is None and "{service}" not in options.router_state:
        rule = "names one router, but --service names no service: put {service} into it"
        raise InvalidInput("--router-state", options.router_state, rule)


def _check_token(path: Path) -> None:
    """Readable now; it is read again at each use."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise InvalidInput("--token-file", path, f"cannot be read: {reason.lower()}") from error
    if not token:
        raise InvalidInput("--token-file", path, "is empty")


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="fulcrum_autoscaler", description="Decides who plays which role.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--service", help="name of the PDService; without it all that there are")
    add("--namespace", help="their namespace (default with --service, else all)")
    add("--store", required=True, help="where the objects are: unix:PATH, kubeconfig:[PATH] or in-cluster")
    add(
        "--router-state",
        help=f"URL of a router's state port ({IN_CLUSTER_ROUTER_STATE_URL.replace('%', '%%')})",
    )
    add(
        "--token-file", required=True, type=Path, help="file with the token for state ports; read at each use"
    )
    add("--host", default="127.0.0.1", help="address to serve /decisions and /metrics on (%(default)s)")
    add("--port", default=0, type=int, help="port for them; 0: any free one (%(default)s)")
    return parser
