"""The control plane that the tests of this folder use: kinds, restart, pause, and the audit log."""

import json
import signal

import pytest

from tools.kubernetes.cluster import API_SERVER, Cluster
from tools.kubernetes.waiting import succeeds, wait_for


def test_our_kinds_are_served_and_a_namespace_is_ready_for_pods(
    control_plane: Cluster, namespace: str
) -> None:
    served = control_plane.read("/apis/fulcrum.dev/v1alpha1")["resources"]
    accounts = control_plane.read(f"/api/v1/namespaces/{namespace}/serviceaccounts")["items"]
    assert {"pdservices", "pdpools", "pdinstances", "pdassignments", "qostiers"} <= {
        kind["name"] for kind in served
    }
    assert [account["metadata"]["name"] for account in accounts] == ["default"]


def test_a_restarted_api_server_still_has_its_objects(control_plane: Cluster, namespace: str) -> None:
    before = control_plane.read(f"/api/v1/namespaces/{namespace}")["metadata"]["uid"]
    control_plane.kill_component(API_SERVER)
    gone = not succeeds(control_plane.get, "/readyz")
    control_plane.start_component(API_SERVER)
    assert (gone, control_plane.read(f"/api/v1/namespaces/{namespace}")["metadata"]["uid"]) == (True, before)


@pytest.mark.usefixtures("namespace")
def test_a_stopped_api_server_responds_only_after_it_continues(control_plane: Cluster) -> None:
    control_plane.signal_component(API_SERVER, signal.SIGSTOP)
    try:
        assert not succeeds(control_plane.get, "/readyz")
    finally:
        control_plane.signal_component(API_SERVER, signal.SIGCONT)
    wait_for(lambda: control_plane.get("/readyz")[0] == 200, "the API server", timeout_s=10)


def test_the_audit_log_names_user_and_verb(control_plane: Cluster, namespace: str) -> None:
    control_plane.kubectl("create", "configmap", "noted", f"--namespace={namespace}")

    def noted() -> bool:
        lines = map(json.loads, control_plane.audit_log.read_text().splitlines())
        made = [line for line in lines if line.get("objectRef", {}).get("name") == "noted"]
        return [(line["user"]["username"], line["verb"]) for line in made] == [("admin", "create")]

    wait_for(noted, "the audit log", timeout_s=10)
