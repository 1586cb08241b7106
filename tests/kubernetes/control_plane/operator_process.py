"""Shared by the operator's tests: operator processes, and fakes of kubelets and engines.

There are no nodes: `FakeKubelet` writes the statuses of pods. All pods have one address of the loopback
network, where one server responds to the operator's role probes.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

OURS = "/apis/fulcrum.dev/v1alpha1"
SOON_S = 15.0
_MERGE = "application/merge-patch+json"

Json = dict[str, Any]


class NamespaceClient:
    """Reads and writes the objects of one namespace as a user."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name

    def path(self, kind: str, name: str = "") -> str:
        """Path of a collection or an object; `kind` is `pods`, `apps/v1/deployments`, `pdservices` …"""
        group, _, plural = kind.rpartition("/")
        root = f"/apis/{group}" if group else OURS if plural in _OUR_KINDS else "/api/v1"
        return f"{root}/namespaces/{self.name}/{plural}" + (f"/{name}" if name else "")

    def create(self, kind: str, body: Json) -> Json:
        """Create an object; returns it as stored."""
        return self._send("POST", self.path(kind), body, "application/json")

    def patch(self, kind: str, name: str, patch: Json, *, status: bool = False) -> Json:
        """Apply a merge patch; returns the changed object."""
        path = self.path(kind, name) + ("/status" if status else "")
        return self._send("PATCH", path, patch, _MERGE)

    def delete(self, kind: str, name: str, options: Json | None = None) -> None:
        """Delete an object; `options` are DeleteOptions."""
        self._send("DELETE", self.path(kind, name), options or {}, "application/json")

    def evict(self, name: str) -> None:
        """Evict a pod as `kubectl drain` does.

        Raises:
            LookupError: with the status, if a disruption budget does not allow it.
        """
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        self._send("POST", f"{self.path('pods', name)}/eviction", body, "application/json")

    def get(self, kind: str, name: str) -> Json:
        """Read an object; raises LookupError if there is none."""
        return dict(self.cluster.read(self.path(kind, name)))

    def names(self, kind: str) -> list[str]:
        """Names of all objects of a kind."""
        return [item["metadata"]["name"] for item in self.list(kind)]

    def list(self, kind: str) -> list[Json]:
        """All objects of a kind."""
        return list(self.cluster.read(self.path(kind))["items"])

    def service(self, name: str = "chat", **spec: Any) -> Json:
        """Create a PDService."""
        body = {
            "apiVersion": "fulcrum.dev/v1alpha1",
            "kind": "PDService",
            "metadata": {"name": name},
            "spec": {"model": "m", "engine": {"type": "Simulated"}, **spec},
        }
        return self.create("pdservices", body)

    def phases(self) -> dict[str, str]:
        """Phase of each instance."""
        found = self.list("pdinstances")
        return {item["metadata"]["name"]: item.get("status", {}).get("phase", "Pending") for item in found}

    def condition(self, kind: str, service: str = "chat") -> Json:
        """A condition of a service; raises LookupError if the status has none of this type."""
        conditions = self.get("pdservices", service).get("status", {}).get("conditions", ())
        found = [condition for condition in conditions if condition["type"] == kind]
        if not found:
            raise LookupError(kind)
        return dict(found[0])

    def events(self) -> dict[str, str]:
        """Messages of the Events of PDServices by reason; of several Events with one reason, any."""
        found = self.list("events")
        return {
            event["reason"]: event["message"]
            for event in found
            if event["involvedObject"]["kind"] == "PDService"
        }

    def event_counts(self, reason: str) -> dict[str, int]:
        """Count of each Event with this reason, by message."""
        found = self.list("events")
        return {event["message"]: event.get("count", 1) for event in found if event["reason"] == reason}

    def _send(self, method: str, path: str, body: Json, kind: str) -> Json:
        status, response = self.cluster.request(method, path, json.dumps(body).encode(), content_type=kind)
        if status >= 300:
            raise LookupError(f"{method} {path}: {status} {response[:300]!r}")
        return dict(json.loads(response))


_OUR_KINDS = ("pdservices", "pdpools", "pdinstances", "pdassignments", "qostiers")


class FakeEngines:
    """The engines of all pods, at one address; `refuses` are the kinds of requests that get status 400."""

    def __init__(self, address: str) -> None:
        self.address, self.refuses = address, set[str]()
        self.requests: list[str] = []

    def status_for(self, body: Json) -> int:
        """Response status for a request."""
        kind = "prefill" if body.get("kv_transfer_params") else "completion"
        self.requests.append(kind)
        return 400 if kind in self.refuses else 200


class QuietHandler(BaseHTTPRequestHandler):
    """An HTTP handler of a fake, which logs nothing."""

    def respond(self, status: int, body: bytes) -> None:
        """Send a whole response."""
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serve_http(handler: type[QuietHandler], address: str, port: int = 0) -> Iterator[int]:
    """Serve at an address during the block; yields the port."""
    server = ThreadingHTTPServer((address, port), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def serve_engines(address: str) -> Iterator[FakeEngines]:
    """Serve role probes on port 8000 of an address during the block."""
    engines = FakeEngines(address)

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.respond(engines.status_for(body), b"{}")

    with serve_http(Handler, address, 8000):
        yield engines


def pick_loopback_address() -> str:
    """Pick a random address of the loopback network, so that parallel runs do not share one."""
    return f"127.{64 + secrets.randbelow(180)}.{secrets.randbelow(250)}.{1 + secrets.randbelow(250)}"


class FakeKubelet:
    """Writes the statuses of pods as a kubelet would."""

    def __init__(self, api: NamespaceClient, address: str) -> None:
        self._api, self._address = api, address

    def set_ready(self, *names: str, restarts: int = 0) -> None:
        """Mark pods as ready."""
        for name in names:
            self._patch_status(
                name, _status("True", "True", self._address, {"running": {"startedAt": _AT}}, restarts)
            )

    def set_node_lost(self, name: str) -> None:
        """Mark a pod as the node controller does when the node is unreachable."""
        self._patch_status(name, _status("False", "True", self._address, {"running": {"startedAt": _AT}}))

    def set_waiting(self, name: str, reason: str, message: str) -> None:
        """Mark the pod's container as waiting."""
        self._patch_status(
            name, _status("False", "False", None, {"waiting": {"reason": reason, "message": message}})
        )

    def set_terminated(self, name: str, restarts: int) -> None:
        """Mark the pod's container as terminated."""
        ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": _AT}}
        self._patch_status(name, _status("False", "False", self._address, ended, restarts))

    def _patch_status(self, name: str, status: Json) -> None:
        self._api.patch("pods", name, {"status": status}, status=True)


_AT = "2026-01-01T00:00:00Z"


def _status(ready: str, containers: str, address: str | None, state: Json, restarts: int = 0) -> Json:
    status = {
        "name": "engine",
        "image": "localhost/fulcrum:1",
        "imageID": "localhost/fulcrum@sha256:0123",
        "ready": containers == "True",
        "restartCount": restarts,
        "state": state,
    }
    found = (("PodScheduled", "True"), ("ContainersReady", containers), ("Ready", ready))
    conditions = [{"type": kind, "status": value, "lastTransitionTime": _AT} for kind, value in found]
    pod_ip = {"podIP": address, "podIPs": [{"ip": address}]} if address else {}
    return {"phase": "Running", "conditions": conditions, "containerStatuses": [status], **pod_ip}


class OperatorProcess:
    """A process of `python -m fulcrum_operator` for one namespace ("": all)."""

    def __init__(self, cluster: Cluster, namespace: str, identity: str, folder: Path, *extra: str) -> None:
        self.identity, self.log = identity, folder / f"{identity}.log"
        token = folder / "token"
        token.write_text("none")
        command = [
            *(sys.executable, "-m", "fulcrum_operator", "--store", f"kubeconfig:{cluster.kubeconfig}"),
            *("--namespace", namespace, "--lease-namespace", namespace, "--identity", identity),
            *("--image", "localhost/fulcrum:1", "--token-file", str(token)),
            *("--host", "127.0.0.1", "--port", "0", *extra),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line.startswith("ready "):
            self.kill()
            raise RuntimeError(f"the operator did not start: {line}{self.log.read_text()}")
        self.port = int(json.loads(line.removeprefix("ready "))["port"])

    def kill(self) -> None:
        """Kill the process as a crash would."""
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._reap()

    def is_leader(self) -> bool:
        """Whether the process is the leader and has completed its first list, by its log."""
        return "initial list complete" in self.log.read_text()

    def rss_mb(self) -> float:
        """Resident memory in megabytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def cpu_s(self) -> float:
        """CPU time used so far, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _reap(self) -> int:
        code = self.process.wait(timeout=20)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


@contextlib.contextmanager
def operator_starter(
    cluster: Cluster, namespace: str, folder: Path
) -> Iterator[Callable[..., OperatorProcess]]:
    """Yields a function that starts operators by identity; all are killed at the end."""
    started: list[OperatorProcess] = []

    def start(identity: str = "op-a", *extra: str) -> OperatorProcess:
        process = OperatorProcess(cluster, namespace, identity, folder, *extra)
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()


def wait_until(condition: Callable[[], bool | None], what: str, *, timeout_s: float = SOON_S) -> float:
    """Wait until the condition is true; returns the seconds that it took."""
    return wait_for(condition, what, timeout_s=timeout_s)
