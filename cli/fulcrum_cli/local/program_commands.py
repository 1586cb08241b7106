"""Command lines of the programs of a local run: router, autoscaler and engines.

The packages are imported for their names, so that a program that is moved breaks an import here and the
import contracts see that a local run needs them. Each package's `__init__` imports nothing else. `run` and
`runtime` start them.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import fulcrum_autoscaler
import fulcrum_router
from fulcrum_cli.local.engines import EngineContext, build_process_spec
from fulcrum_cli.local.supervised_process import ProcessSpec
from fulcrum_core.api import PDInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """Options that the router and the autoscaler of one run share."""

    service: str
    namespace: str
    host: str
    store_address: str
    token_file: Path


def router_command(options: SharedOptions, ports: Mapping[str, int]) -> tuple[str, ...]:
    """Command line of the router on these ports, by their names in the ready line; 0 is any free port."""
    return (
        *(sys.executable, "-m", fulcrum_router.__name__, *_shared_arguments(options)),
        *("--port", str(ports["port"]), "--state-port", str(ports["state_port"])),
        *("--metrics-port", str(ports["metrics_port"])),
    )


def autoscaler_command(options: SharedOptions, port: int, router_state: str) -> tuple[str, ...]:
    """Command line of the autoscaler on this port, 0 for any; `router_state` is the state port's URL."""
    return (
        *(sys.executable, "-m", fulcrum_autoscaler.__name__, *_shared_arguments(options)),
        *("--port", str(port), "--router-state", router_state),
    )


def _shared_arguments(options: SharedOptions) -> tuple[str, ...]:
    return (
        *("--service", options.service, "--namespace", options.namespace, "--host", options.host),
        *("--store", options.store_address, "--token-file", str(options.token_file)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCommands:
    """The functions that make each program's command line; tests pass their own."""

    engine: Callable[[PDInstance, EngineContext], ProcessSpec] = build_process_spec
    router: Callable[[SharedOptions, Mapping[str, int]], tuple[str, ...]] = router_command
    autoscaler: Callable[[SharedOptions, int, str], tuple[str, ...]] = autoscaler_command
