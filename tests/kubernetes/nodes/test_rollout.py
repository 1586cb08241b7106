"""New images and CRDs under constant load: engines, operator, autoscaler, routers."""

import json
from collections.abc import Callable
from functools import partial

import pytest

from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.components import are_components_ready, list_component_pods
from tests.kubernetes.nodes.installation import IMAGE, NEXT_IMAGE, Helm, build_values
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.router_state import StatePort, open_state_port
from tests.kubernetes.nodes.service import DeployedService
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for


class TransferObserver:
    """Pairs that transferred KV during a roll-out, and whether their engines were of different revisions.

    Names are used again: an instance whose engine changed during an observation is skipped in it.
    """

    def __init__(self, service: DeployedService, state: StatePort) -> None:
        self._service, self._state = service, state
        self.pairs: set[tuple[str, str]] = set()
        self.between_revisions: set[tuple[str, str]] = set()

    def observe_until(self, done: Callable[[], bool]) -> bool:
        """Observe once; return `done()`."""
        before, pairs, after = self._engines(), self._state.read().pairs, self._engines()
        for pair in pairs:
            names = pair.prefill, pair.decode
            engines = [before.get(name) for name in names]
            if None in engines or engines != [after.get(name) for name in names]:
                continue
            if pair.verified + pair.recomputed + pair.unknown:
                self.pairs.add(names)
                if engines[0] != engines[1]:
                    self.between_revisions.add(names)
        return done()

    def _engines(self) -> dict[str, str]:
        """Return the engine of each instance whose identity is known."""
        statuses = self._service.instances().items()
        return {name: status["identity"]["engine"] for name, status in statuses if "identity" in status}


@pytest.mark.timeout(600)
def test_engine_image_rollout_fails_no_request_and_pairs_no_engines_of_different_images(
    cluster: Cluster, service: DeployedService, load: Load, record_measurement: RecordMeasurement
) -> None:
    image = _choose_other_image([pod.image for pod in service.engines()])
    with open_state_port(cluster, service.address()) as state, load.window(f"engine image {image}") as window:
        transfers = TransferObserver(service, state)
        service.patch("pdservices", {"spec": {"engine": {"image": image}}})
        rolled_out = partial(transfers.observe_until, partial(_engines_run, service, image))
        rolled_out_s = wait_for(rolled_out, "the rollout", timeout_s=140)
    record_measurement(
        f"engines run {image} after {rolled_out_s:.1f} s; {len(transfers.pairs)} pairs transferred KV"
    )
    assert (window.all_succeeded(), transfers.between_revisions, transfers.pairs != set()) == (
        True,
        set(),
        True,
    )


def _choose_other_image(images: list[str]) -> str:
    return IMAGE if NEXT_IMAGE in images else NEXT_IMAGE


def _engines_run(service: DeployedService, image: str) -> bool:
    return {pod.image for pod in service.engines()} == {image} and service.is_fully_ready()


@pytest.mark.timeout(600)
def test_helm_upgrade_of_operator_and_router_fails_no_request(
    cluster: Cluster, service: DeployedService, helm: Helm, load: Load, record_measurement: RecordMeasurement
) -> None:
    image = _choose_other_image([pod.image for pod in list_component_pods(cluster, "operator")])
    with load.window(f"helm upgrade to {image}") as window:
        helm.upgrade(build_values(image))
        upgraded_s = wait_for(
            partial(_all_components_run, cluster, service, image), "the upgrade", timeout_s=150
        )
    record_measurement(f"operator, autoscaler and routers run {image} {upgraded_s:.1f} s after helm")
    assert window.all_succeeded()


def _all_components_run(cluster: Cluster, service: DeployedService, image: str) -> bool:
    """Engines keep their image: an upgrade of the control plane does not restart them."""
    pods = [
        *list_component_pods(cluster, "operator"),
        *list_component_pods(cluster, "autoscaler"),
        *service.routers(),
    ]
    return (
        {pod.image for pod in pods} == {image} and are_components_ready(cluster) and service.is_fully_ready()
    )


@pytest.mark.timeout(480)
def test_upgrade_of_the_crds_fails_no_request(
    cluster: Cluster, service: DeployedService, load: Load, record_measurement: RecordMeasurement
) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    field_path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/fieldOfTheNextRelease"
    kinds = ("pdservices", "pdinstances", "pdassignments")
    with load.window("new fields in the CRDs") as window:
        for change in (
            {"op": "add", "path": field_path, "value": {"type": "string"}},
            {"op": "remove", "path": field_path},
        ):
            for kind in kinds:
                body = json.dumps([change]).encode()
                status, response = cluster.request(
                    "PATCH", f"{path}/{kind}.fulcrum.dev", body, content_type="application/json-patch+json"
                )
                assert status == 200, response
            name, role = service.flip_one_instance()
            acted_s = wait_for(partial(service.serves_role, name, role), "a flip", timeout_s=30)
            record_measurement(f"a flip took {acted_s:.1f} s after the CRDs changed")
        service.wait_until_ready()
    assert window.all_succeeded()
