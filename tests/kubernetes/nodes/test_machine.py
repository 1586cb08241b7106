"""The three nodes that the scenarios stand on."""

import pytest

from tests.kubernetes.clusters import TIMES_S
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import succeeds, wait_for

POD = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  nodeName: {node}
  terminationGracePeriodSeconds: 1
  containers:
  - {{name: web, image: "localhost/busybox:1", command: [sh, -c, "hostname > /tmp/index.html; httpd -f -p 8080 -h /tmp"]}}
"""


@pytest.mark.usefixtures("cluster")
def test_three_nodes_are_up_within_15_seconds_and_have_the_image_within_10() -> None:
    print(f"\n{ {what: round(took_s, 1) for what, took_s in TIMES_S.items()} }")
    assert TIMES_S["3 nodes"] <= 15.0
    assert TIMES_S["fulcrum-1"] <= 10.0


def test_cut_pair_of_nodes_stay_ready_and_do_not_reach_each_other(cluster: Cluster, namespace: str) -> None:
    for node in ("n1", "n2"):
        cluster.kubectl(
            "apply", f"--namespace={namespace}", "-f", "-", stdin=POD.format(name=node, node=node)
        )
    cluster.kubectl(
        "wait", "--for=condition=Ready", f"--namespace={namespace}", "--all", "pod", "--timeout=30s"
    )
    address = cluster.read(f"/api/v1/namespaces/{namespace}/pods/n2")["status"]["podIP"]
    ask = (
        "exec",
        f"--namespace={namespace}",
        "n1",
        "--",
        "wget",
        "-qO/dev/null",
        "-T1",
        f"http://{address}:8080/sh",
    )
    wait_for(lambda: succeeds(cluster.kubectl, *ask), "the pods to reach each other", timeout_s=20)
    cluster.cut_pair("n1", "n2")
    try:
        reached = succeeds(cluster.kubectl, *ask)
        ready = [cluster.is_ready(node) for node in ("n1", "n2")]
    finally:
        cluster.mend_pair("n1", "n2")
    wait_for(lambda: succeeds(cluster.kubectl, *ask), "the pods to reach each other again", timeout_s=20)
    assert (reached, ready) == (False, [True, True])
