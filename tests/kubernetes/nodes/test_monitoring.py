"""What a person sees of a cluster: Prometheus without its operator, and `fulcrum web` with a kubeconfig."""

import contextlib
import http.client
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.control_plane.cli_service import CommandLine
from tests.kubernetes.monitoring.promtool import require_program
from tests.kubernetes.nodes.service import INSTANCES, DeployedService
from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

PORT = 9909
"""Of Prometheus, in the network of its node."""
SELECTOR = 'namespace="default",service="chat"'


def read_documented_config(pods: list[dict[str, Any]]) -> dict[str, Any]:
    """The scrape configuration of the how-to page, for these pods.

    Debian's Prometheus is built without discovery in Kubernetes: targets and their labels are listed here as
    that would find them. The page's relabelling is done by Prometheus.
    """
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    assert found is not None
    config: dict[str, Any] = yaml.safe_load(found[1])
    for job in config["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["static_configs"] = [target for pod in pods for target in list_targets(pod)]
    return {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, **config}


def list_targets(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """List the ports of a pod with the labels of Prometheus' discovery."""
    meta = pod["metadata"]
    labels: dict[str, str] = {}
    for name, value in meta.get("labels", {}).items():
        plain = re.sub(r"\W", "_", name)
        labels |= {f"pod_label_{plain}": value, f"pod_labelpresent_{plain}": "true"}
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            found = labels | {
                "namespace": meta["namespace"],
                "pod_name": meta["name"],
                "pod_container_port_name": port.get("name", ""),
            }
            yield {
                "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
                "labels": {f"__meta_kubernetes_{name}": value for name, value in found.items()},
            }


class Prometheus:
    """A Prometheus in the network of one node."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self._node = cluster.nodes[node]

    def query(self, expr: str) -> dict[str, float]:
        """Values by the labels of their series; empty while Prometheus does not respond."""
        path = f"/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        with self._node.enter_network(), contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
            with contextlib.closing(connection):
                connection.request("GET", path)
                response = connection.getresponse()
                if response.status == 200:
                    series = json.loads(response.read())["data"]["result"]
                    return {" ".join(sorted(s["metric"].values())): float(s["value"][1]) for s in series}
        return {}


@pytest.fixture
def prometheus(cluster: Cluster, service: DeployedService, tmp_path: Path) -> Iterator[Prometheus]:  # noqa: ARG001 - its pods are ready first
    """Prometheus with the documented scrape configuration, on node n1."""
    program, config = require_program("prometheus"), tmp_path / "prometheus.yml"
    pods = cluster.read("/api/v1/pods")["items"]
    config.write_text(
        yaml.safe_dump(read_documented_config([pod for pod in pods if "podIP" in pod["status"]]))
    )
    process = cluster.nodes["n1"].start(
        tmp_path / "prometheus.log",
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{PORT}",
    )
    try:
        yield Prometheus(cluster, "n1")
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_a_prometheus_without_its_operator_scrapes_engines_routers_and_components(
    service: DeployedService, prometheus: Prometheus
) -> None:
    roles = {name: entry["role"].lower() for name, entry in service.read_assignment_entries().items()}
    scraped: dict[str, float] = {}

    def are_scraped() -> bool:
        scraped.update(prometheus.query("sum by (job) (up)"))
        return scraped.get("fulcrum-components", 0) >= 2 and expected.items() <= scraped.items()

    expected = {"fulcrum-engines": INSTANCES, "fulcrum-routers": 2}
    with contextlib.suppress(TimeoutError):
        wait_for(are_scraped, "all targets", timeout_s=60)
    assert expected.items() <= scraped.items(), scraped
    assert prometheus.query("sum by (job) (up == 0)") == {}
    engines = prometheus.query(f"max by (instance, role) (vllm:kv_cache_usage_perc{{{SELECTOR}}})")
    assert engines.keys() == {f"{name} {role}" for name, role in roles.items()}
    serving = prometheus.query(f"max by (role) (fulcrum_router_serving_instances{{{SELECTOR}}})")
    assert sum(serving.values()) == INSTANCES
    # The operator that leads may be the last one to be scraped.
    leaders = "sum(fulcrum_operator_leader)"
    wait_for(lambda: prometheus.query(leaders) == {"": 1}, "the operator that leads", timeout_s=30)
    # Counted from the first assignment that the autoscaler reads, which may come after the first scrape.
    assigned = f"count(fulcrum_autoscaler_assigned_instances{{{SELECTOR}}})"
    wait_for(lambda: prometheus.query(assigned) == {"": 2}, "the roles of the autoscaler", timeout_s=30)


def test_fulcrum_web_shows_a_service_of_the_cluster(
    cluster: Cluster, service: DeployedService, tmp_path: Path
) -> None:
    command = CommandLine(cluster.kubeconfig, tmp_path, "default")
    with command.start("web", "chat") as process:
        try:
            assert process.stdout is not None
            address = re.search(r"(http://\S+/)#(\S+)", process.stdout.readline())
            assert address is not None
            state = read_state_with_traffic(address[1], address[2], service)
        finally:
            process.terminate()
    roles = service.read_assignment_entries()
    assert {tile["name"]: (tile["role"], tile["serving"]) for tile in state["tiles"]} == {
        name: (entry["role"], True) for name, entry in roles.items()
    }
    assert (state["service"], state["unavailable"], state["attained"] is not None) == ("chat", [], True)
    assert [decision["reason"] for decision in state["decisions"]], "the log has the first split"


def read_state_with_traffic(url: str, token: str, service: DeployedService) -> dict[str, Any]:
    """Send requests until the page shows them; return that state."""
    request = urllib.request.Request(f"{url}api/states", headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as response:
        for _ in range(120):
            with service.stream("n1", tokens=4) as stream:
                stream.read()
            line = response.readline()
            if line.startswith(b"data: "):
                state: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                if state["attained"] is not None and all(tile["serving"] for tile in state["tiles"]):
                    return state
    raise AssertionError("the page never showed the requests")
