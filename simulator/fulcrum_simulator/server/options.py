"""The command-line options of the engine server, parsed and validated, for `__main__`.

A local run and the operator's adapter of simulated engines write these command lines.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum_cluster.process import ArgumentParser
from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile, load_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Validated options.

    A port of 0 lets the system choose a free one; `seed` 0 means steps without noise.
    """

    name: str
    model: str
    profile: EngineProfile
    host: str
    port: int
    side_channel_port: int
    lease_s: float
    """Lease on exported KV cache, in seconds."""
    shutdown_timeout_s: float
    """Time that SIGTERM gives running requests, in seconds."""
    max_model_tokens: int
    """Longest prompt plus output, in tokens."""
    seed: int
    role: str | None = None
    """The only role that the engine serves; requests of the other role are refused. None serves both."""


def parse_options(arguments: Sequence[str]) -> Options:
    """Parse and validate `arguments`.

    Raises:
        InvalidInput: if a value breaks a rule.
        SystemExit: with code 2 and one line on stderr, if the arguments cannot be parsed; with code 0 after
            `--help`.
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


def _require(valid: bool, path: str, value: object, rule: str) -> None:
    if not valid:
        raise InvalidInput(path, value, rule)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m fulcrum_simulator.server",
        description="Runs one simulated engine behind vLLM's HTTP API.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--name", required=True, help="name of the instance, used in its log")
    add("--model", required=True, help="name of the served model; requests must use exactly this name")
    add("--profile", required=True, help="engine profile: the name of a shipped one or a .yaml file")
    add(
        "--host",
        default="127.0.0.1",
        help="address of both ports, also sent to decode instances (%(default)s)",
    )
    add("--port", type=int, default=0, help="HTTP port; 0: any free port (%(default)s)")
    add(
        "--side-channel-port",
        type=int,
        default=0,
        help="port on which decode instances pull KV cache; 0: any free port (%(default)s)",
    )
    add(
        "--lease-s",
        type=float,
        default=30.0,
        help="seconds for which exported KV cache is kept for a decode instance (%(default)s)",
    )
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
        help="longest prompt plus output, in tokens; 0: the size of the KV cache (%(default)s)",
    )
    add(
        "--role",
        choices=("prefill", "decode"),
        help="serve only this role, like engines whose role is a start-up option (default: both)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the noise of up to 5 %% in step durations; 0: no noise (%(default)s)",
    )
    return parser
