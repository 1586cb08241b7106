"""The real HorizontalPodAutoscaler scales a PDPool by its /scale subresource."""

import base64
import functools
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.control_plane.operator_process import (
    FakeKubelet,
    NamespaceClient,
    QuietHandler,
    operator_starter,
    pick_loopback_address,
    serve_engines,
    wait_until,
)
from tools.kubernetes import pki
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.control_plane import API_ADDRESS

GROUP = "external.metrics.k8s.io"
PORT = 7443
METRIC = "tokens"


@contextmanager
def serve_metric(cluster: Cluster, folder: Path, values: dict[str, int]) -> Iterator[bytes]:
    """Serve external metrics on the control plane's machine; yields the authority of its certificate."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            body = json.dumps(_metrics_response(self.path, values)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    authority = pki.read_certificate(cluster.folder / "pki", "ca")
    host = "metrics.default.svc"
    pki.issue_certificate(authority, host, hosts=(API_ADDRESS, host)).write(folder, "metrics")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "metrics.crt", folder / "metrics.key")
    with cluster.hub.enter_network():
        server = ThreadingHTTPServer((API_ADDRESS, PORT), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield authority.certificate_pem()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _metrics_response(path: str, values: dict[str, int]) -> dict[str, Any]:
    if path.partition("?")[0].rstrip("/").endswith("v1beta1"):
        resource = {
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": ["get"],
        }
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": f"{GROUP}/v1beta1",
            "resources": [{**resource, "name": METRIC}],
        }
    item = {
        "metricName": METRIC,
        "metricLabels": {},
        "timestamp": _seconds(time.time()),
        "value": str(values[METRIC]),
    }
    return {
        "kind": "ExternalMetricValueList",
        "apiVersion": f"{GROUP}/v1beta1",
        "metadata": {},
        "items": [item],
    }


def _seconds(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


@contextmanager
def registered_metrics_api(cluster: Cluster, authority: bytes) -> Iterator[None]:
    """During the block the API server asks the test for external metrics.

    An API that nobody serves would keep namespaces from being deleted.
    """
    port = {"name": "https", "protocol": "TCP"}
    objects = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "metrics", "namespace": "default"},
            "spec": {"ports": [{**port, "port": 443, "targetPort": PORT}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "metrics",
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": "metrics"},
            },
            "addressType": "IPv4",
            "ports": [{**port, "port": PORT}],
            "endpoints": [{"addresses": [API_ADDRESS], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1beta1.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "caBundle": base64.b64encode(authority).decode(),
                "service": {"name": "metrics", "namespace": "default"},
            },
        },
    ]
    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=manifest)
    path = f"/apis/{GROUP}/v1beta1/namespaces/default/{METRIC}"
    try:
        wait_until(lambda: cluster.get(path)[0] == 200, "the metrics API", timeout_s=60)
        yield
    finally:
        cluster.kubectl("delete", "-f", "-", stdin=manifest)


def autoscaler(pool: str) -> dict[str, Any]:
    """An HPA that wants one instance for every ten tokens."""
    target = {"type": "AverageValue", "averageValue": "10"}
    policy = {"policies": [{"type": "Pods", "value": 10, "periodSeconds": 1}]}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "pool"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDPool", "name": pool},
            "minReplicas": 2,
            "maxReplicas": 8,
            "metrics": [{"type": "External", "external": {"metric": {"name": METRIC}, "target": target}}],
            "behavior": {"scaleUp": policy, "scaleDown": {**policy, "stabilizationWindowSeconds": 0}},
        },
    }


@pytest.mark.timeout(300)
def test_an_hpa_scales_a_pool_up_and_down_and_nobody_fights_it(
    control_plane: Cluster, namespace: str, tmp_path: Path
) -> None:
    values = {METRIC: 20}
    address = pick_loopback_address()
    with (
        serve_metric(control_plane, tmp_path, values) as authority,
        registered_metrics_api(control_plane, authority),
        serve_engines(address),
        operator_starter(control_plane, namespace, tmp_path) as start,
    ):
        start()
        api = NamespaceClient(control_plane, namespace)
        kubelet = FakeKubelet(api, address)
        api.service(
            pools=[{"name": "flex", "instances": {"min": 2, "max": 8}}],
            autoscaling={"scale": {"owner": "External"}},
            drain={"timeout": "1s"},
        )

        def serving(count: int) -> bool:
            for name in set(api.names("pods")):
                if name.rpartition("-")[2].isdigit():
                    kubelet.set_ready(name)
            return list(api.phases().values()) == ["Serving"] * count

        seen = []
        wait_until(lambda: serving(2), "two instances", timeout_s=60)
        api.create("autoscaling/v2/horizontalpodautoscalers", autoscaler("chat-flex"))
        for tokens, count in ((40, 4), (20, 2)):
            values[METRIC] = tokens
            wait_until(functools.partial(serving, count), f"{count} instances", timeout_s=60)
            seen.append(api.get("pdpools", "chat-flex")["spec"]["replicas"])
        written = api.get("pdpools", "chat-flex")["metadata"]["generation"]
    assert (seen, written) == ([4, 2], 3), "created, scaled up, scaled down"
