"""Services on clusters with IPv4 and IPv6: the router's address has the family of the Service.

Each cluster is a control plane of its own, because its families are fixed at the start.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kubernetes.clusters import temporary_namespace
from tests.kubernetes.control_plane.operator_process import NamespaceClient, operator_starter, wait_until
from tests.kubernetes.control_plane.service_stack import Process
from tools.kubernetes.cluster import Cluster

SLICES = "discovery.k8s.io/v1/endpointslices"
IPV4, IPV6 = "10.96.0.0/16", "fd00:10:96::/112"
ROUTER_ADDRESSES = {"IPv4": "10.89.1.7", "IPv6": "fd00:10:89::7"}
SUBJECT = "system:serviceaccount:default:reader"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("ranges", "advertised", "family"),
    [
        pytest.param(f"{IPV4},{IPV6}", "10.88.0.1", "IPv4", id="dual stack, IPv4 first"),
        pytest.param(f"{IPV6},{IPV4}", "fd00:10:88::1", "IPv6", id="dual stack, IPv6 first"),
    ],
)
def test_traffic_is_directed_to_a_router_of_the_services_family(
    start_cluster: Callable[..., Cluster], tmp_path: Path, ranges: str, advertised: str, family: str
) -> None:
    flags = {"service-cluster-ip-range": ranges, "advertise-address": advertised}
    cluster = start_cluster(0, api_server=flags)
    try:
        with (
            temporary_namespace(cluster) as namespace,
            operator_starter(cluster, namespace, tmp_path) as start,
        ):
            api = NamespaceClient(cluster, namespace)
            operator = start()
            api.service(instances=2)
            wait_until(lambda: "chat-router" in api.names(SLICES), f"the slice: {operator.log}")
            found = api.get("services", "chat")["spec"]
            assert (found["ipFamilies"], api.get(SLICES, "chat-router")["addressType"]) == ([family], family)
            router = Process.start(
                "fulcrum_router",
                *("--service", "chat", "--namespace", namespace, "--host", "*"),
                *("--store", f"kubeconfig:{cluster.kubeconfig}", "--state-callers", SUBJECT),
                *("--lease", "chat-router", "--identity", "r"),
                *("--advertise-address", ROUTER_ADDRESSES[family]),
            )
            try:
                router.wait_ready()
                wait_until(lambda: addresses(api) == [ROUTER_ADDRESSES[family]], "the router's address")
            finally:
                router.kill()
    finally:
        cluster.stop()


def addresses(api: NamespaceClient) -> list[str]:
    """Addresses in the service's slice."""
    endpoints = api.get(SLICES, "chat-router").get("endpoints") or ()
    return [address for endpoint in endpoints for address in endpoint["addresses"]]
