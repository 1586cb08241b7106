"""New images and new kinds under a steady load: engines one after the other, operator, routers, CRDs."""

import json
from collections.abc import Callable
from functools import partial

import pytest

from tests.conftest import Figure
from tests.kubernetes.nodes.components import all_ready, component_pods
from tests.kubernetes.nodes.installation import IMAGE, NEXT_IMAGE, Helm, values
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.router_state import StatePort, state_port
from tests.kubernetes.nodes.service import Service
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for


class HandOffs:
    """Who handed KV to whom in a roll-out, as the router counts it, and what engines they were then.

    A name is given again, to an instance with another engine: who has another one after a look than before it
    tells nothing in that look.
    """

    def __init__(self, service: Service, state: StatePort) -> None:
        self._service, self._state = service, state
        self.pairs: set[tuple[str, str]] = set()
        self.between_strangers: set[tuple[str, str]] = set()

    def seen_until(self, done: Callable[[], bool]) -> bool:
        """Look once, and whether that was the last look."""
        before, pairs, after = self._engines(), self._state.read().pairs, self._engines()
        for pair in pairs:
            names = pair.prefill, pair.decode
            engines = [before.get(name) for name in names]
            if None in engines or engines != [after.get(name) for name in names]:
                continue
            if pair.proven + pair.recomputed + pair.unknown:
                self.pairs.add(names)
                if engines[0] != engines[1]:
                    self.between_strangers.add(names)
        return done()

    def _engines(self) -> dict[str, str]:
        """By instance: what engine it is, as far as it is known."""
        statuses = self._service.instances().items()
        return {name: status["identity"]["engine"] for name, status in statuses if "identity" in status}


@pytest.mark.timeout(600)
def test_rolling_update_of_the_engine_image_fails_no_request_and_pairs_no_strangers(
    cluster: Cluster, service: Service, load: Load, figure: Figure
) -> None:
    image = _another([pod.image for pod in service.engines()])
    with state_port(cluster, service.address()) as state, load.window(f"engine image {image}") as seen:
        handed = HandOffs(service, state)
        service.patch("pdservices", {"spec": {"engine": {"image": image}}})
        rolled = partial(handed.seen_until, partial(_engines_run, service, image))
        rolled_s = wait_for(rolled, "the rollout", timeout_s=140)
    figure(f"engines run {image} after {rolled_s:.1f} s; {len(handed.pairs)} pairs handed over")
    assert (seen.all_right(), handed.between_strangers, handed.pairs != set()) == (True, set(), True)


def _another(images: list[str]) -> str:
    return IMAGE if NEXT_IMAGE in images else NEXT_IMAGE


def _engines_run(service: Service, image: str) -> bool:
    return {pod.image for pod in service.engines()} == {image} and service.is_whole()


@pytest.mark.timeout(600)
def test_helm_upgrade_of_operator_and_router_fails_no_request(
    cluster: Cluster, service: Service, helm: Helm, load: Load, figure: Figure
) -> None:
    image = _another([pod.image for pod in component_pods(cluster, "operator")])
    with load.window(f"helm upgrade to {image}") as seen:
        helm.upgrade(values(image))
        upgraded_s = wait_for(partial(_all_run, cluster, service, image), "the upgrade", timeout_s=150)
    figure(f"operator, autoscaler and routers run {image} {upgraded_s:.1f} s after helm")
    assert seen.all_right()


def _all_run(cluster: Cluster, service: Service, image: str) -> bool:
    """Engines stay as they are: an upgrade of what controls them is no reason to start them again."""
    pods = [*component_pods(cluster, "operator"), *component_pods(cluster, "autoscaler"), *service.routers()]
    return {pod.image for pod in pods} == {image} and all_ready(cluster) and service.is_whole()


@pytest.mark.timeout(480)
def test_upgrade_of_the_crds_fails_no_request(
    cluster: Cluster, service: Service, load: Load, figure: Figure
) -> None:
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
            figure(f"a flip took {acted_s:.1f} s after the CRDs changed")
        service.wait_whole()
    assert seen.all_right()
