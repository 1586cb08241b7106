"""What an engine adapter answers: all that is needed to start one engine, as frozen values.

A runtime turns it into a process or a pod. Text may hold `$(POD_IP)`, which Kubernetes puts in; a local run
says its own address. Everything is on the command line or in the environment: no adapter needs a file.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from fulcrum_core.api import EngineIdentitySpec
from fulcrum_core.models import Fit
from fulcrum_core.values import FlipStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlacement:
    """Where an engine runs, and what its programs are called there.

    Args:
        host: The address that it listens on and that peers are told.
        port: Of its HTTP API.
        side_channel_port: Where peers ask for its KV; data-parallel rank r takes r more.
        cache_port: Of its LMCache server, and of an LMCache peer; an LMCache peer takes two for each rank.
        cache_http_port: Of its LMCache server's health and metrics.
        program: The engine.
        model_folder: Where a model on a claim or a path is mounted; empty: at the path itself.
        cache_folder: Where KV on disk goes.
        loopback: Whether all peers are on this machine.
    """

    host: str
    port: int
    side_channel_port: int
    cache_port: int
    cache_http_port: int
    program: tuple[str, ...] = ("vllm",)
    model_folder: str = "/models"
    cache_folder: str = "/var/cache/lmcache"
    loopback: bool = False


@dataclass(frozen=True, slots=True)
class LaunchEnvVar:
    """A variable: a value, or the field of the pod that it is read from, or the key `token` of a secret."""

    name: str
    value: str = ""
    pod_field: str = ""
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """A port that the engine listens on."""

    name: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A folder of the engine: a claim, a path of the node, memory, or scratch space on its disk."""

    name: str
    mount: str
    kind: Literal["claim", "path", "memory", "scratch"]
    source: str = ""
    size_bytes: int | None = None
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, what it is and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """One engine, ready to be started.

    Args:
        command: Program and arguments.
        env: Its environment.
        ports: What it listens on.
        volumes: What it reads and writes.
        health_path: Answers 200 from the moment that it can serve. It goes on doing so while the engine shuts
            down: no sign of readiness.
        startup_s: How long a start takes, all going well; a runtime allows a multiple of it.
        shutdown_s: From SIGTERM to its end: running requests may finish.
        identity: What it is to its peers.
        flip_strategy: How it changes its role.
        leftover_files: Files that outlive it where it does not run in a container of its own.
    """

    command: tuple[str, ...]
    env: tuple[LaunchEnvVar, ...]
    ports: tuple[Port, ...]
    volumes: tuple[Volume, ...]
    health_path: str
    startup_s: float
    shutdown_s: float
    identity: EngineIdentitySpec
    flip_strategy: FlipStrategy
    leftover_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """A launch with what led to it. With refusals there is nothing to start."""

    launch: EngineLaunch | None
    fit: Fit
    choices: tuple[Choice, ...]
    unsupported: tuple[str, ...]


def compact_json(value: Any) -> str:
    """JSON as it goes on a command line."""
    return json.dumps(value, separators=(",", ":"))
