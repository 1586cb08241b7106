"""What cannot run is told by name, in conditions and Events, and what can run serves on."""

import pytest

from tests.kubernetes.nodes.components import component_pods
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.service import MODEL, Service
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

MANIFEST = f"""
apiVersion: fulcrum.dev/v1alpha1
kind: PDService
metadata: {{name: odd}}
spec:
  model: {MODEL}
  engine: {{type: Simulated, profile: laptop}}
  qosTiers: [no-such-tier]
  pools:
  - {{name: well, instances: {{min: 2}}}}
  - name: image
    instances: {{min: 1}}
    template: {{spec: {{containers: [{{name: engine, image: "localhost/no-such-image:1"}}]}}}}
  - name: secret
    instances: {{min: 1}}
    template:
      spec:
        containers:
        - name: engine
          env: [{{name: TOKEN, valueFrom: {{secretKeyRef: {{name: no-such-secret, key: token}}}}}}]
  - name: node
    instances: {{min: 1}}
    template: {{spec: {{nodeSelector: {{example.com/no-such: node}}}}}}
  - name: load
    instances: {{min: 1}}
    template: {{spec: {{containers: [{{name: engine, args: [--no-such-option]}}]}}}}
"""
NAMED = {
    "ImagePullFailed": "no-such-image",
    "EngineDoesNotStart": "no-such-secret",
    "Unschedulable": "0/3 nodes are available",
    "InstanceFailed": "exit code 2",
    "TierMissing": "no-such-tier",
}
"""Each trouble's Event, and what it has to name."""
LASTING = {"no-such-image", "no-such-secret", "0/3 nodes are available"}
"""What the condition has to name, too; an engine that ends and starts again comes and goes there."""


@pytest.mark.timeout(480)
def test_whatever_cannot_run_is_told_by_name_and_the_rest_serves(
    cluster: Cluster, namespace: str, load: Load
) -> None:
    odd, before = Service(cluster, namespace, "odd"), _operators(cluster)
    with load.window("five pools beside it, four of which cannot run") as seen:
        cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=MANIFEST)
        told_s = wait_for(lambda: _lacking(odd) == set(), "the events", timeout_s=90)
        wait_for(lambda: odd.first_token("n1"), "a first token", timeout_s=30)
        wait_for(lambda: _unnamed(odd) == set(), "the condition", timeout_s=30)
        degraded, tiers = odd.condition("Degraded"), odd.condition("TiersAccepted")
        cluster.kubectl("delete", "pdservice", "odd", f"--namespace={namespace}", "--timeout=60s")
    print(f"all told after {told_s:.1f} s: {degraded['message']}")
    assert "no-such-tier" in tiers["message"]
    assert seen.all_right()
    assert _operators(cluster) == before


def _operators(cluster: Cluster) -> dict[str, int]:
    """How often each operator was started again."""
    return {pod.name: pod.restarts for pod in component_pods(cluster, "operator")}


def _lacking(service: Service) -> set[str]:
    """Which Events are not there yet, or do not name what they are about."""
    messages = service.messages()
    return {reason for reason, word in NAMED.items() if word not in messages.get(reason, "")}


def _unnamed(service: Service) -> set[str]:
    """What the condition does not say yet: its message may follow the Events by seconds."""
    message = service.condition("Degraded")["message"]
    return {word for word in LASTING if word not in message}
