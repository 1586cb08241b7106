"""Builds a service on the control plane as an operator would, and runs `fulcrum` against it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.kubernetes.cluster import Cluster

API = "fulcrum.dev/v1alpha1"
MERGE = "application/merge-patch+json"
SINCE = "2026-01-01T00:00:00.000000Z"
IDENTITY = {"model": "m", "engine": "sim:1", "kvDtype": "float16", "blockSize": 16, "tensorParallel": 1}


@dataclass(frozen=True)
class CommandLine:
    """`fulcrum` with a kubeconfig, on a machine without a local run."""

    kubeconfig: Path
    home: Path
    namespace: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the program needs."""
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH") if key in os.environ}
        return {**kept, "KUBECONFIG": str(self.kubeconfig), "XDG_RUNTIME_DIR": str(self.home), **self.options}

    def command(self, *arguments: str) -> list[str]:
        """Return the full command line."""
        return [sys.executable, "-m", "fulcrum_cli", *arguments, "-n", self.namespace]

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end, at most 30 s."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start the command."""
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


class Service:
    """A PDService `chat` with instances and an assignment, created and changed by the test."""

    def __init__(self, cluster: Cluster, namespace: str, *, roles: Mapping[str, str]) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._make("PDService", "chat", {"model": "m", "instances": len(roles)})
        for name, role in roles.items():
            self._make("PDInstance", name, {"service": "chat", "pool": "flex", "model": "m", "engine": {}})
            self.set_instance_status(name, role=role)
        entries = {name: {"role": role, "since": SINCE, "by": "Operator"} for name, role in roles.items()}
        self._make("PDAssignment", "chat", {"service": "chat", "roles": entries})

    def set_instance_status(self, name: str, **status: Any) -> None:
        """Write the status of an instance; by default its phase is Serving."""
        fields = {"phase": "Serving", "endpoint": "192.0.2.1:8000", "identity": IDENTITY, **status}
        self._patch(f"pdinstances/{name}/status", {"status": fields})

    def set_status(self, **status: Any) -> None:
        """Write the status of the service."""
        self._patch("pdservices/chat/status", {"status": status})

    def patch_entry(self, name: str, **entry: Any) -> None:
        """Change an entry of the assignment."""
        self._patch("pdassignments/chat", {"spec": {"roles": {name: entry}}})

    def entry(self, name: str) -> dict[str, Any]:
        """Return the entry of an instance."""
        found: dict[str, Any] = self.assignment()["spec"]["roles"][name]
        return found

    def assignment(self) -> dict[str, Any]:
        """Return the PDAssignment."""
        found: dict[str, Any] = self._cluster.read(self._path("pdassignments/chat"))
        return found

    def _make(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        body = {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self._send("POST", f"{kind.lower()}s", body, "application/json")

    def _patch(self, path: str, body: Mapping[str, Any]) -> None:
        self._send("PATCH", path, body, MERGE)

    def _send(self, method: str, path: str, body: Mapping[str, Any], kind: str) -> None:
        status, response = self._cluster.request(
            method, self._path(path), json.dumps(body).encode(), content_type=kind
        )
        assert status in (200, 201), response

    def _path(self, path: str) -> str:
        return f"/apis/{API}/namespaces/{self._namespace}/{path}"


def create_objects(cluster: Cluster, namespace: str, bodies: Sequence[Mapping[str, Any]]) -> None:
    """Apply Kubernetes objects with kubectl."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(bodies)})
    cluster.kubectl("-n", namespace, "apply", "-f", "-", stdin=text)
