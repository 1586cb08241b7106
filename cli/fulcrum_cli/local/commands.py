"""The command lines of a local run."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fulcrum_cli.local.engines import Around, engine_life
from fulcrum_cli.local.life import Life
from fulcrum_core.api import PDInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the programs of one run are told about each other."""

    service: str
    namespace: str
    host: str
    store: str
    token_file: Path


def router_command(around: Surroundings, port: int, state_port: int) -> tuple[str, ...]:
    """The router on these ports; 0 is any."""
    return (
        *(sys.executable, "-m", "fulcrum_router", *_shared(around)),
        *("--port", str(port), "--state-port", str(state_port)),
    )


def autoscaler_command(around: Surroundings, port: int, router_state: str) -> tuple[str, ...]:
    """The autoscaler on this port, 0 for any, told where the router's state port is."""
    return (
        *(sys.executable, "-m", "fulcrum_autoscaler", *_shared(around)),
        *("--port", str(port), "--router-state", router_state),
    )


def _shared(around: Surroundings) -> tuple[str, ...]:
    return (
        *("--service", around.service, "--namespace", around.namespace, "--host", around.host),
        *("--store", around.store, "--token-file", str(around.token_file)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Which programs a run starts."""

    engine: Callable[[PDInstance, Around], Life] = engine_life
    router: Callable[[Surroundings, int, int], tuple[str, ...]] = router_command
    autoscaler: Callable[[Surroundings, int, str], tuple[str, ...]] = autoscaler_command
