"""Pools that cannot run are named in conditions and Events; the other pools serve."""

import pytest

from tests.kubernetes.nodes.components import list_component_pods
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.service import MODEL, DeployedService
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
EVENT_NAMES_CAUSE = {
    "ImagePullFailed": "no-such-image",
    "EngineStartFailed": "no-such-secret",
    "Unschedulable": "0/3 nodes are available",
    "InstanceFailed": "exit code 2",
    "TierMissing": "no-such-tier",
}
"""Reason of each Event, and the cause that its message must name."""
CONDITION_NAMES_CAUSE = {"no-such-image", "no-such-secret", "0/3 nodes are available"}
"""Causes that the condition must name, too; not the crash-looping engine, which comes and goes."""


@pytest.mark.timeout(480)
def test_what_cannot_run_is_named_in_events_and_condition_and_the_rest_serves(
    cluster: Cluster, namespace: str, load: Load
) -> None:
    odd, before = DeployedService(cluster, namespace, "odd"), _operator_restarts(cluster)
    with load.window("another service with five pools, four of which cannot run") as window:
        cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=MANIFEST)
        reported_after_s = wait_for(lambda: _missing_events(odd) == set(), "the events", timeout_s=90)
        wait_for(lambda: odd.receives_first_token("n1"), "a first token", timeout_s=30)
        wait_for(lambda: _missing_in_condition(odd) == set(), "the condition", timeout_s=30)
        degraded, tiers = odd.condition("Degraded"), odd.condition("TiersAccepted")
        cluster.kubectl("delete", "pdservice", "odd", f"--namespace={namespace}", "--timeout=60s")
    print(f"all causes reported after {reported_after_s:.1f} s: {degraded['message']}")
    assert "no-such-tier" in tiers["message"]
    assert window.all_succeeded()
    assert _operator_restarts(cluster) == before


def _operator_restarts(cluster: Cluster) -> dict[str, int]:
    """Return the number of restarts of each operator pod."""
    return {pod.name: pod.restarts for pod in list_component_pods(cluster, "operator")}


def _missing_events(service: DeployedService) -> set[str]:
    """Return the reasons whose Events are missing or do not name the cause."""
    messages = service.messages()
    return {reason for reason, cause in EVENT_NAMES_CAUSE.items() if cause not in messages.get(reason, "")}


def _missing_in_condition(service: DeployedService) -> set[str]:
    """Return the causes that the condition's message does not name; it may follow the Events by seconds."""
    message = service.condition("Degraded")["message"]
    return {cause for cause in CONDITION_NAMES_CAUSE if cause not in message}
