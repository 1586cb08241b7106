"""Nobody may do more than they do: roles are held to the API server's audit log.

It runs after what a service lives through: the log tells of that. What no scenario has done is done here.
"""

import json
from functools import partial

import pytest

from fulcrum_core.api import PDService
from fulcrum_operator.manifests.children import children_of
from fulcrum_operator.manifests.names import Account, ClusterSettings
from tests.kubernetes.nodes.installation import NAMESPACE
from tests.kubernetes.nodes.load import loaded
from tests.kubernetes.nodes.rights import Right, granted, refused, rights_of, used
from tests.kubernetes.nodes.service import INSTANCES, Service
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

OPERATOR, AUTOSCALER = "fulcrum-operator", "fulcrum-autoscaler"
AFTER_A_LOST_RACE: set[Right] = {
    ("fulcrum.dev", plural, "get") for plural in ("pdassignments", "pdpools", "pdservices")
}
"""What operator and autoscaler ask only after somebody else's write came between its reading and its own."""


def router_rights(service: Service) -> set[Right]:
    """What the operator grants to the service's router."""
    accounts = Account(NAMESPACE, OPERATOR), Account(NAMESPACE, AUTOSCALER)
    settings = ClusterSettings(image="i", operator=accounts[0], autoscaler=accounts[1])
    chat = PDService.model_validate(service.read("pdservices"))
    (role,) = (child for child in children_of(chat, settings, wanted=1) if child["kind"] == "Role")
    return rights_of(role["rules"])


def with_a_lost_pod(cluster: Cluster, service: Service, _seed: int) -> None:
    """A pod is deleted by somebody."""
    cluster.kubectl("delete", "pod", min(service.instances()), "--wait=false")
    service.wait_whole(timeout_s=120)


def with_another_pool(cluster: Cluster, service: Service, _seed: int) -> None:
    """A pool comes, whose one instance has a name that somebody else's pod has taken, and goes again."""
    used_names = service.instances()
    taken = next(name for n in range(INSTANCES + 1) if (name := f"chat-{n}") not in used_names)
    container = {"name": "other", "image": "localhost/busybox:1"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": taken},
        "spec": {"containers": [container]},
    }
    cluster.request("POST", "/api/v1/namespaces/default/pods", json.dumps(body).encode())
    pools = [{"name": "flex", "instances": {"min": INSTANCES}}, {"name": "more", "instances": {"min": 1}}]
    service.patch("pdservices", {"spec": {"instances": None, "pools": pools}})
    wait_for(lambda: taken in service.instances(), "an instance of the taken name", timeout_s=60)
    cluster.kubectl("delete", "pod", taken, "--grace-period=1")
    service.wait_whole(INSTANCES + 1, timeout_s=120)
    service.patch("pdservices", {"spec": {"instances": INSTANCES, "pools": None}})
    service.wait_whole(timeout_s=120)


def with_another_leader(cluster: Cluster, service: Service, _seed: int) -> None:
    """The leader ends between two roll-outs; in the first, flips restart engines."""
    strategy = partial(_strategy, service)
    strategy("Restart")
    name, role = service.flip_one()
    wait_for(partial(service.plays, name, role), "the flip", timeout_s=120)
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{OPERATOR}"
    leader = cluster.read(lease)["spec"]["holderIdentity"]
    cluster.kubectl("delete", "pod", f"--namespace={NAMESPACE}", leader)
    strategy("Auto")


def _strategy(service: Service, word: str) -> None:
    """Change how instances flip, which rolls them out anew."""
    before = {pod.uid for pod in service.engines()}
    service.patch("pdservices", {"spec": {"autoscaling": {"flip": {"strategy": word}}}})
    wait_for(
        lambda: not before & {pod.uid for pod in service.engines()}, f"the roll-out of {word}", timeout_s=240
    )
    service.wait_whole(timeout_s=120)


def with_flips_of_the_autoscaler(cluster: Cluster, service: Service, seed: int) -> None:
    """Decoding is never as fast as was asked for: more of it is wanted.

    The load is dense enough to be seen at every tick: at 5 requests a second, each of which decodes for an
    eighth of one, ticks of a second may fall into the gaps for minutes.
    """

    def has_flipped() -> bool:
        return "Autoscaler" in {entry["by"] for entry in service.roles().values()}

    if [entry["role"] for entry in service.roles().values()].count("Prefill") < 2:
        name, role = service.flip_one()  # the floor would hold the only one
        wait_for(partial(service.plays, name, role), "a second prefill instance", timeout_s=60)
    with loaded(cluster, service, seed, node="n1", tell=print):
        service.patch("pdservices", {"spec": {"slo": {"tpot": "1ms"}}})
        wait_for(has_flipped, "a flip by the autoscaler", timeout_s=90)
        service.patch("pdservices", {"spec": {"slo": {"tpot": None}}})


LIFE = (with_another_pool, with_a_lost_pod, with_flips_of_the_autoscaler, with_another_leader)


@pytest.mark.timeout(900)
def test_what_each_part_may_do_is_what_it_does(cluster: Cluster, service: Service, seed: int) -> None:
    router = router_rights(service)
    accounts = {
        "operator": (NAMESPACE, OPERATOR, granted(cluster, NAMESPACE, OPERATOR), router | AFTER_A_LOST_RACE),
        "autoscaler": (NAMESPACE, AUTOSCALER, granted(cluster, NAMESPACE, AUTOSCALER), AFTER_A_LOST_RACE),
        "router": ("default", "chat-router", router, set()),
    }

    def idle() -> dict[str, list[Right]]:
        return {
            part: sorted(held - excused - used(cluster, namespace, account))
            for part, (namespace, account, held, excused) in accounts.items()
        }

    for experience in LIFE:
        if any(unused := idle().values()):
            print(f"{experience.__name__}, for {list(unused)}")
            experience(cluster, service, seed)
    missing = {
        part: sorted(refused(cluster, namespace, account))
        for part, (namespace, account, _, _) in accounts.items()
    }
    nothing: dict[str, list[Right]] = {part: [] for part in accounts}
    assert (idle(), missing) == (nothing, nothing)
