"""What an engine server is started with."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile, load_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One engine server. A port of 0 lets the system choose; `seed` 0 means steps without jitter."""

    name: str
    model: str
    profile: EngineProfile
    host: str
    port: int
    side_channel_port: int
    lease_s: float
    shutdown_timeout_s: float
    max_model_tokens: int
    seed: int
    role: str | None = None
    """`prefill` or `decode`: it refuses what belongs to the other role. None: each request says its role."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2, as everywhere in the project."""
        self.exit(2, f"error: {message}\n")


def parse_options(arguments: Sequence[str]) -> Options:
    """The options in `arguments`.

    Raises:
        InvalidInput: for a value that breaks a rule.
        SystemExit: code 2 and one line on stderr for arguments that cannot be parsed; code 0 after `--help`.
    """
    parsed = _parser().parse_args(arguments)
    profile = load_profile(parsed.profile)
    for name, port in (("--port", parsed.port), ("--side-channel-port", parsed.side_channel_port)):
        _require(0 <= port <= 65535, name, port, "is not between 0 and 65535")
    _require(parsed.lease_s > 0, "--lease-s", parsed.lease_s, "must be positive")
    _require(
        parsed.shutdown_timeout >= 0, "--shutdown-timeout", parsed.shutdown_timeout, "must not be negative"
    )
    capacity = profile.kv_blocks * profile.block_size
    longest = parsed.max_model_len or capacity
    fits = 0 < longest <= capacity
    _require(
        fits,
        "--max-model-len",
        longest,
        f"is not between 1 and the KV cache's {capacity} tokens",
    )
    return Options(
        name=parsed.name,
        model=parsed.model,
        profile=profile,
        host=parsed.host,
        port=parsed.port,
        side_channel_port=parsed.side_channel_port,
        lease_s=parsed.lease_s,
        shutdown_timeout_s=parsed.shutdown_timeout,
        max_model_tokens=longest,
        seed=parsed.seed,
        role=parsed.role,
    )


def _require(holds: bool, path: str, value: object, rule: str) -> None:
    if not holds:
        raise InvalidInput(path, value, rule)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m fulcrum_simulator.server", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--name", required=True, help="name of the instance, for its log")
    add("--model", required=True, help="model name that it serves, compared to the letter")
    add("--profile", required=True, help="engine profile: a shipped name or a .yaml file")
    add(
        "--host",
        default="127.0.0.1",
        help="address of both ports, and the one that peers are told (%(default)s)",
    )
    add("--port", type=int, default=0, help="HTTP port; 0: any (%(default)s)")
    add(
        "--side-channel-port",
        type=int,
        default=0,
        help="port where peers pull KV cache; 0: any (%(default)s)",
    )
    add("--lease-s", type=float, default=30.0, help="seconds that KV cache is held for a peer (%(default)s)")
    add(
        "--shutdown-timeout",
        type=float,
        default=0.0,
        help="seconds that SIGTERM gives running requests (%(default)s)",
    )
    add(
        "--max-model-len",
        type=int,
        default=0,
        help="longest prompt plus output, tokens; 0: the KV cache (%(default)s)",
    )
    add(
        "--role",
        choices=("prefill", "decode"),
        help="serve this role only, as engines do whose role is a start-up option (both)",
    )
    add("--seed", type=int, default=0, help="jitters steps by 5 %%; 0: no jitter (%(default)s)")
    return parser
