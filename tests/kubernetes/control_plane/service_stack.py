"""A service without an operator: objects created by the test, engine servers and routers as processes."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from fulcrum_core.router_state import STATE_PORT_AUDIENCE, RouterState
from tools.kubernetes.cluster import Cluster

SERVICE = "chat"
MODEL = "tiny"
HOST = "127.0.0.1"
LEASE = f"{SERVICE}-router"
ENGINES = 4
START_S = 30.0
SINCE = "2026-01-01T00:00:00.000000Z"
IDENTITY = {"model": MODEL, "engine": "e", "kvDtype": "bf16", "blockSize": 16, "tensorParallel": 1}
API_VERSION = "fulcrum.dev/v1alpha1"


@dataclass
class Process:
    """A process of one of the project's programs, and its ports once it is ready."""

    popen: subprocess.Popen[str]
    ports: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(cls, module: str, *arguments: str) -> "Process":
        """Start a program without waiting for it."""
        command = [sys.executable, "-m", module, *arguments]
        return cls(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    def wait_ready(self) -> "Process":
        """Wait for the `ready` line and read the ports from it.

        Raises:
            RuntimeError: if the process writes anything else, or nothing in time.
        """
        assert self.popen.stdout is not None
        readable, _, _ = select.select([self.popen.stdout], [], [], START_S)
        line = self.popen.stdout.readline() if readable else ""
        if not line.startswith("ready "):
            self.kill()
            raise RuntimeError(f"{self.popen.args!r} wrote {line!r} instead of a ready line")
        self.ports = json.loads(line.removeprefix("ready "))
        return self

    def kill(self) -> None:
        """Kill the process; no effect if it has ended."""
        self.popen.kill()
        self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()


@dataclass
class RouterProcess:
    """One router of the service."""

    process: Process
    identity: str
    address: str

    @property
    def url(self) -> str:
        """URL to which clients send completion requests."""
        return f"http://127.0.0.1:{self.process.ports['port']}/v1/completions"

    @property
    def state_url(self) -> str:
        """URL of the state port."""
        return f"http://127.0.0.1:{self.process.ports['state_port']}"


@dataclass
class RoutedService:
    """Engines, routers and objects of one service."""

    cluster: Cluster
    namespace: str
    engines: dict[str, Process]
    token: str = ""
    routers: list[RouterProcess] = field(default_factory=list)

    @property
    def store(self) -> str:
        """Address of the store, for `--store`."""
        return f"kubeconfig:{self.cluster.kubeconfig}"

    @property
    def subject(self) -> str:
        """ServiceAccount that may call state ports."""
        return f"system:serviceaccount:{self.namespace}:reader"

    def start_router(self) -> RouterProcess:
        """Start one more router without waiting for it."""
        number = len(self.routers) + 1
        identity, address = f"{LEASE}-{number}", f"10.88.77.{number}"
        process = Process.start(
            "fulcrum_router",
            *("--service", SERVICE, "--namespace", self.namespace, "--store", self.store),
            *("--state-callers", self.subject, "--lease", LEASE),
            *("--identity", identity, "--advertise-address", address),
        )
        self.routers.append(RouterProcess(process, identity, address))
        return self.routers[-1]

    def path(self, api: str, plural: str, name: str = "") -> str:
        """Path of an object, or of all objects of a kind, in the API."""
        root = "api" if "/" not in api else "apis"
        return f"/{root}/{api}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def send(
        self, method: str, path: str, body: Any, *, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """Write as the cluster's administrator.

        Raises:
            RuntimeError: unless the status is 200 or 201.
        """
        status, response = self.cluster.request(
            method, path, json.dumps(body).encode(), content_type=content_type
        )
        if status not in (200, 201):
            raise RuntimeError(f"{method} {path}: {status} {response[:300]!r}")
        stored: dict[str, Any] = json.loads(response)
        return stored

    def patch(self, path: str, body: Any) -> dict[str, Any]:
        """Send a JSON merge patch."""
        return self.send("PATCH", path, body, content_type="application/merge-patch+json")

    def slice_addresses(self) -> list[str]:
        """Addresses in the EndpointSlice."""
        found = self.cluster.read(self.path("discovery.k8s.io/v1", "endpointslices", LEASE))
        return [address for endpoint in found["endpoints"] or () for address in endpoint["addresses"]]

    def reader_token(self) -> str:
        """Create a token of the account that may call state ports."""
        command = (
            "create",
            "token",
            "reader",
            f"--namespace={self.namespace}",
            f"--audience={STATE_PORT_AUDIENCE}",
        )
        return self.cluster.kubectl(*command).strip()

    def state(self, router: RouterProcess, **query: Any) -> RouterState | int:
        """Read the state of a router; returns the HTTP status unless that is 200."""
        headers = {"authorization": f"Bearer {self.token}"}
        response = httpx.get(
            f"{router.state_url}/state", headers=headers, params=query, timeout=30, trust_env=False
        )
        return (
            RouterState.model_validate_json(response.content)
            if response.status_code == 200
            else response.status_code
        )

    def serving(self, router: RouterProcess) -> set[str]:
        """Names of the instances to which a router sends new work."""
        state = self.state(router)
        return set() if isinstance(state, int) else {i.name for i in state.instances if i.serving}


@contextlib.contextmanager
def engine_servers(count: int = ENGINES) -> Iterator[dict[str, Process]]:
    """Run engine servers during the block; keys are the names of their instances."""
    started: dict[str, Process] = {}
    try:
        for number in range(count):
            name = f"{SERVICE}-{number}"
            command = ("--name", name, "--model", MODEL, "--profile", "laptop", "--port", "0")
            started[name] = Process.start("fulcrum_simulator.server", *command)
        for process in started.values():
            process.wait_ready()
        yield started
    finally:
        for process in started.values():
            process.kill()


@contextlib.contextmanager
def routed(
    cluster: Cluster, namespace: str, engines: dict[str, Process], **service: Any
) -> Iterator[RoutedService]:
    """Create the objects of a service with these engines; the caller starts the routers."""
    stack = RoutedService(cluster, namespace, engines)
    try:
        _create_objects(stack, service)
        stack.token = stack.reader_token()
        yield stack
    finally:
        for router in stack.routers:
            router.process.kill()


def _create_objects(stack: RoutedService, service: dict[str, Any]) -> None:
    names = list(stack.engines)
    half = len(names) // 2
    spec = {"model": MODEL, "instances": len(names), **service}
    _create(stack, API_VERSION, "pdservices", "PDService", SERVICE, spec=spec)
    for name, engine in stack.engines.items():
        own = {"service": SERVICE, "pool": f"{SERVICE}-flex", "model": MODEL, "engine": {"profile": "laptop"}}
        _create(stack, API_VERSION, "pdinstances", "PDInstance", name, spec=own)
        endpoint = f"{HOST}:{engine.ports['port']}"
        status = {"phase": "Serving", "endpoint": endpoint, "identity": IDENTITY}
        stack.patch(stack.path(API_VERSION, "pdinstances", name) + "/status", {"status": status})
        container = {"name": "engine", "image": "localhost/none:1"}
        labels = {"fulcrum.dev/service": SERVICE}
        _create(stack, "v1", "pods", "Pod", name, labels=labels, spec={"containers": [container]})
        # A router sends no work to a pod without an address.
        address = {"podIP": HOST, "podIPs": [{"ip": HOST}]}
        stack.patch(stack.path("v1", "pods", name) + "/status", {"status": {"phase": "Running", **address}})
    roles = {
        name: {"role": "Prefill" if number < half else "Decode", "since": SINCE, "by": "Operator"}
        for number, name in enumerate(names)
    }
    _create(
        stack,
        API_VERSION,
        "pdassignments",
        "PDAssignment",
        SERVICE,
        spec={"service": SERVICE, "roles": roles},
    )
    _create(stack, "coordination.k8s.io/v1", "leases", "Lease", LEASE, spec={})
    slice_ = {"addressType": "IPv4", "endpoints": [], "ports": []}
    _create(stack, "discovery.k8s.io/v1", "endpointslices", "EndpointSlice", LEASE, **slice_)
    _create(stack, "v1", "serviceaccounts", "ServiceAccount", "reader")


def _create(
    stack: RoutedService, api: str, plural: str, kind: str, name: str, *, labels: Any = None, **fields: Any
) -> None:
    metadata = {"name": name, "namespace": stack.namespace, "labels": labels or {}}
    stack.send(
        "POST", stack.path(api, plural), {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}
    )


def stop(process: Process, number: int, *, timeout_s: float) -> tuple[int, float]:
    """Send a signal and wait for the process to end; returns its exit code and the seconds it took."""
    began_s = time.monotonic()
    os.kill(process.popen.pid, number)
    return process.popen.wait(timeout_s), time.monotonic() - began_s
