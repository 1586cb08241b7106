"""The output of an engine adapter: everything that is needed to start one engine, as frozen values.

The manifests turn a launch into a pod, the local run into a process. In a pod, text may contain `$(POD_IP)`,
which Kubernetes replaces. Command line and environment suffice: no adapter needs a file. The adapters build
these values and never start an engine.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal, Self

from fulcrum_core.api import EngineIdentitySpec
from fulcrum_core.api.engine import ModelSourceSpec
from fulcrum_core.api.env import EnvVar, EnvVarSource
from fulcrum_core.models import Fit
from fulcrum_core.values import FlipStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlacement:
    """Address, ports, program and folders of an engine.

    Args:
        host: Address that the engine listens on and announces to its peers.
        port: Port of its HTTP API.
        side_channel_port: Port at which peers request its KV; data-parallel rank r adds r.
        cache_port: Port of its LMCache server, or first port of an LMCache peer, which has two for each rank.
        cache_http_port: Port for health and metrics of its LMCache server.
        program: Command that starts the engine.
        model_folder: Mount point of a model on a claim, on a path or in an image; empty for the path itself.
        download_folder: Mount point of a shared folder for downloads; empty for the folder's own path.
        cache_folder: Folder for KV on disk.
        loopback: Whether all peers are on this machine.
        in_pod: Whether the engine runs in a pod, so that `$(POD_IP)` is replaced.
    """

    host: str
    port: int
    side_channel_port: int
    cache_port: int
    cache_http_port: int
    program: tuple[str, ...] = ("vllm",)
    model_folder: str = "/models"
    download_folder: str = "/var/cache/hub"
    cache_folder: str = "/var/cache/lmcache"
    loopback: bool = False
    in_pod: bool = False


@dataclass(frozen=True, slots=True)
class LaunchEnvVar:
    """An environment variable: a value, a field of the pod, a key of a Secret, or a user's source."""

    name: str
    value: str = ""
    pod_field: str = ""
    secret: str = ""
    secret_key: str = ""
    source: EnvVarSource | None = None

    @classmethod
    def hub_token(cls, source: ModelSourceSpec) -> Self | None:
        """The access token of the hub; None if the source names no Secret."""
        if source.token_secret is None:
            return None
        return cls("HF_TOKEN", secret=source.token_secret, secret_key=source.token_key or "token")

    @classmethod
    def from_user(cls, variable: EnvVar) -> Self:
        """The variable as the user wrote it."""
        return cls(variable.name, variable.value, source=variable.value_from)


@dataclass(frozen=True, slots=True)
class Port:
    """A port that the engine listens on."""

    name: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A folder of the engine: a claim, a path on the node, an image, memory, or scratch space on the node."""

    name: str
    mount: str
    kind: Literal["claim", "path", "image", "memory", "scratch"]
    source: str = ""
    size_bytes: int | None = None
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResources:
    """What an instance takes from its node besides devices: requests, and the limits above them.

    Args:
        cpu: Cores.
        cpu_limit: Most cores.
        memory_bytes: Memory, LMCache's memory tier included.
        memory_limit_bytes: Memory above which the engine is killed.
        shared_memory_bytes: Size of /dev/shm, which counts as memory.
        storage_bytes: Storage on the node, with LMCache's disk tier.
        storage_limit_bytes: Storage above which the pod is evicted; None: no limit.
        temporary_limit_bytes: Largest size of /tmp, part of the storage; None: no limit.
    """

    cpu: int
    cpu_limit: int
    memory_bytes: int
    memory_limit_bytes: int
    shared_memory_bytes: int
    storage_bytes: int
    storage_limit_bytes: int | None
    temporary_limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, its value and the reason for the value, as `fulcrum plan` shows them."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """One engine, ready to be started.

    Args:
        command: Program and arguments.
        env: Environment variables.
        ports: Ports that the engine listens on.
        volumes: Folders that the engine reads and writes, besides /tmp.
        resources: What it takes from its node besides devices.
        health_path: Path that responds with 200 once the engine can serve. It still does while the engine
            shuts down, so it does not show readiness.
        startup_s: Expected seconds of a start; a runtime allows a multiple.
        shutdown_s: Seconds from SIGTERM to the exit, in which running requests may finish.
        identity: Properties that decide which peers the engine can exchange KV with.
        flip_strategy: How the instance changes its role.
        leftover_files: Files that the engine leaves behind if it does not run in a container.
    """

    command: tuple[str, ...]
    env: tuple[LaunchEnvVar, ...]
    ports: tuple[Port, ...]
    volumes: tuple[Volume, ...]
    resources: EngineResources
    health_path: str
    startup_s: float
    shutdown_s: float
    identity: EngineIdentitySpec
    flip_strategy: FlipStrategy
    leftover_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """A launch with the choices that led to it; no launch if anything is unsupported."""

    launch: EngineLaunch | None
    fit: Fit
    choices: tuple[Choice, ...]
    unsupported: tuple[str, ...]


def compact_json(value: Any) -> str:
    """The value as JSON without spaces, for a command line."""
    return json.dumps(value, separators=(",", ":"))
