"""One life of a program: what is started, and how one hears that it serves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

Ports = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What a program is started with, this time.

    Args:
        command: Program and arguments.
        env: Over the environment of whoever starts it.
        ports: Where it was told to listen; None: it chooses, and says in its ready line what.
        health_url: Answers 200 once it serves; asked only of a program that was told its ports.
        ready_timeout_s: It gets at least so long to come to serve, in seconds.
        stop_grace_s: From SIGTERM to SIGKILL, in seconds; None: as for every program.
        leftover_files: Files that outlive it and are nobody's afterwards.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ports: Ports | None = None
    health_url: str = ""
    ready_timeout_s: float = 0.0
    stop_grace_s: float | None = None
    leftover_files: tuple[Path, ...] = ()
