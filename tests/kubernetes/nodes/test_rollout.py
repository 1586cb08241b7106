"""New images and new kinds under a steady load: engines one after the other, operator, routers, CRDs."""

import json
from collections.abc import Callable
from functools import partial

import pytest

from tests.kubernetes.nodes.components import all_ready, component_pods
from tests.kubernetes.nodes.installation import IMAGE, NEXT_IMAGE, Helm, values
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.router_state import StatePort, state_port
from tests.kubernetes.nodes.service import Service
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for


class HandOffs:
    """Who handed KV to whom in a roll-out, as the router counts it, and what engines they were."""

    def __init__(self, service: Service, state: StatePort) -> None:
        self._service, self._state = service, state
        self.pairs: set[tuple[str, str]] = set()
        self._engines: dict[str, str] = {}

    def seen_until(self, done: Callable[[], bool]) -> bool:
        """Look once, and whether that was the last look."""
        for name, status in self._service.instances().items():
            if identity := status.get("identity"):
                self._engines[name] = identity["engine"]
        for pair in self._state.read().pairs:
            if pair.proven + pair.recomputed + pair.unknown:
                self.pairs.add((pair.prefill, pair.decode))
        return done()

    def between_strangers(self) -> list[tuple[str, str]]:
        """Pairs of engines that cannot read each other's KV cache."""
        known = self._engines
        return sorted(pair for pair in self.pairs if known[pair[0]] != known[pair[1]])


@pytest.mark.timeout(600)
def test_rolling_update_of_the_engine_image_fails_no_request_and_pairs_no_strangers(
    cluster: Cluster, service: Service, load: Load
) -> None:
    for image in (NEXT_IMAGE, None):
        with state_port(cluster, service.address()) as state, load.window(f"engine image {image}") as seen:
            handed = HandOffs(service, state)
            service.patch("pdservices", {"spec": {"engine": {"image": image}}})
            rolled = partial(handed.seen_until, partial(_engines_run, service, image or IMAGE))
            rolled_s = wait_for(rolled, "the rollout", timeout_s=140)
        strangers = handed.between_strangers()
        print(f"engines run {image or IMAGE} after {rolled_s:.1f} s; {len(handed.pairs)} pairs, {strangers}")
        assert (seen.all_right(), strangers, handed.pairs != set()) == (True, [], True)


def _engines_run(service: Service, image: str) -> bool:
    return {pod.image for pod in service.engines()} == {image} and service.is_whole()


@pytest.mark.timeout(600)
def test_helm_upgrade_of_operator_and_router_fails_no_request(
    cluster: Cluster, service: Service, helm: Helm, load: Load
) -> None:
    for image in (NEXT_IMAGE, IMAGE):
        with load.window(f"helm upgrade to {image}") as seen:
            helm.upgrade(values(image))
            upgraded_s = wait_for(partial(_all_run, cluster, service, image), "the upgrade", timeout_s=150)
        print(f"all run {image} {upgraded_s:.1f} s after helm")
        assert seen.all_right()


def _all_run(cluster: Cluster, service: Service, image: str) -> bool:
    """Engines stay as they are: an upgrade of what controls them is no reason to start them again."""
    pods = [*component_pods(cluster, "operator"), *component_pods(cluster, "autoscaler"), *service.routers()]
    return {pod.image for pod in pods} == {image} and all_ready(cluster) and service.is_whole()


@pytest.mark.timeout(480)
def test_upgrade_of_the_crds_fails_no_request(cluster: Cluster, service: Service, load: Load) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    place = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/fieldOfTheNextRelease"
    kinds = ("pdservices", "pdinstances", "pdassignments")
    with load.window("new fields in the CRDs") as seen:
        for change in (
            {"op": "add", "path": place, "value": {"type": "string"}},
            {"op": "remove", "path": place},
        ):
            for kind in kinds:
                body = json.dumps([change]).encode()
                status, said = cluster.request(
                    "PATCH", f"{path}/{kind}.fulcrum.dev", body, kind="application/json-patch+json"
                )
                assert status == 200, said
            name, role = service.flip_one()
            acted_s = wait_for(partial(service.plays, name, role), "a flip", timeout_s=30)
            print(f"a flip took {acted_s:.1f} s after the change")
        service.wait_whole()
    assert seen.all_right()
