"""The command lines of a local run."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fulcrum_cli.local.engines import EngineContext, build_process_spec
from fulcrum_cli.local.process_spec import ProcessSpec
from fulcrum_core.api import PDInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """What the programs of one run are told about each other."""

    service: str
    namespace: str
    host: str
    store_address: str
    token_file: Path


def router_command(options: SharedOptions, port: int, state_port: int) -> tuple[str, ...]:
    """The router on these ports; 0 is any."""
    return (
        *(sys.executable, "-m", "fulcrum_router", *_shared_arguments(options)),
        *("--port", str(port), "--state-port", str(state_port)),
    )


def autoscaler_command(options: SharedOptions, port: int, router_state: str) -> tuple[str, ...]:
    """The autoscaler on this port, 0 for any, told where the router's state port is."""
    return (
        *(sys.executable, "-m", "fulcrum_autoscaler", *_shared_arguments(options)),
        *("--port", str(port), "--router-state", router_state),
    )


def _shared_arguments(options: SharedOptions) -> tuple[str, ...]:
    return (
        *("--service", options.service, "--namespace", options.namespace, "--host", options.host),
        *("--store", options.store_address, "--token-file", str(options.token_file)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCommands:
    """Which programs a run starts."""

    engine: Callable[[PDInstance, EngineContext], ProcessSpec] = build_process_spec
    router: Callable[[SharedOptions, int, int], tuple[str, ...]] = router_command
    autoscaler: Callable[[SharedOptions, int, str], tuple[str, ...]] = autoscaler_command
