"""Flips under constant load: no request fails, no text is wrong, the router applies each flip at once."""

import asyncio
import contextlib
import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulcrum_cli.assignment.writes import AssignmentWrite, flip_instance
from fulcrum_cli.regret.recorded_traffic import RecordedTraffic, add_spec, parse_page
from fulcrum_cli.web.sources import ClusterRouter
from fulcrum_cluster.client import open_cluster, open_store
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.values import Role
from fulcrum_simulator.percentile import percentile
from tests.conftest import RecordMeasurement
from tests.kubernetes.control_plane.cli_service import CommandLine
from tests.kubernetes.nodes.components import find_leading_operator, has_restarted
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.pods import signal_pod
from tests.kubernetes.nodes.router_state import StatePort, open_state_port
from tests.kubernetes.nodes.service import INSTANCES, DeployedService
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

RELABEL_FLIPS, RESTART_FLIPS = 300, 4
STORES = 4
"""Clients to write with: each allows 100 requests a second."""
ACKNOWLEDGED_P99_TARGET_S = 0.1
"""The target; reported and not asserted, because other programs share the machine."""
ACKNOWLEDGED_P99_MAX_S = 2.0


@pytest.fixture
def manual_service(service: DeployedService) -> Iterator[DeployedService]:
    """The service with autoscaling Off, so that all flips are the scenario's."""
    service.patch("pdservices", {"spec": {"autoscaling": {"mode": "Off"}}})
    yield service
    service.restore_spec()
    service.wait_until_ready(timeout_s=120)


def generate_flips(service: DeployedService, rng: random.Random) -> Iterator[tuple[str, Role]]:
    """Yield flips that keep both roles served: each second flip restores the split."""
    roles = {name: Role(entry["role"]) for name, entry in service.read_assignment_entries().items()}
    for majority in itertools.cycle((Role.PREFILL, Role.DECODE)):
        name = rng.choice(sorted(name for name, role in roles.items() if role is majority))
        if sum(role is majority for role in roles.values()) < 2:
            continue
        roles[name] = Role.DECODE if majority is Role.PREFILL else Role.PREFILL
        yield name, roles[name]


@pytest.mark.timeout(480)
async def test_300_relabel_flips_are_acknowledged_and_fail_no_request(
    cluster: Cluster,
    manual_service: DeployedService,
    load: Load,
    record_measurement: RecordMeasurement,
    seed: int,
) -> None:
    planned = list(itertools.islice(generate_flips(manual_service, random.Random(seed)), RELABEL_FLIPS))
    with (
        open_state_port(cluster, manual_service.address()) as state,
        load.window(f"{RELABEL_FLIPS} flips, Relabel") as window,
    ):
        delays_s = await _measure_flips(cluster, state, planned)
    p50_s, p99_s = percentile(delays_s, 50), percentile(delays_s, 99)
    assert p99_s is not None
    kept = "kept" if p99_s <= ACKNOWLEDGED_P99_TARGET_S else f"MISSED: {ACKNOWLEDGED_P99_TARGET_S} s"
    record_measurement(
        f"flip, decision to acknowledgement: p50 {p50_s:.4f} s, p99 {p99_s:.4f} s ({kept}), "
        f"longest {max(delays_s):.4f} s"
    )
    assert (window.all_succeeded(), p99_s <= ACKNOWLEDGED_P99_MAX_S) == (True, True)
    recorded = await _read_recorded_traffic(cluster, manual_service)
    assert (recorded.service, recorded.ran_as.instances) == ("chat", INSTANCES)
    assert 0.0 < (recorded.attainment or 0.0) <= 1.0


async def _read_recorded_traffic(cluster: Cluster, service: DeployedService) -> RecordedTraffic:
    """Read the requests that the router recorded, as `fulcrum regret` does."""
    async with open_cluster(f"kubeconfig:{cluster.kubeconfig}") as client:
        router = ClusterRouter(client.objects, "chat", namespace="default")
        document = await router.read_document("requests")
    spec = PDServiceSpec.model_validate(service.read("pdservices")["spec"])
    return parse_page(add_spec(document, spec), "router of chat")


async def _measure_flips(cluster: Cluster, state: StatePort, planned: list[tuple[str, Role]]) -> list[float]:
    """Flip one instance after the other; return the seconds from each decision to its acknowledgement."""
    delays_s: list[float] = []
    async with contextlib.AsyncExitStack() as opened:
        address = f"kubeconfig:{cluster.kubeconfig}"
        stores = [await opened.enter_async_context(open_store(address)) for _ in range(STORES)]
        for store, (instance, role) in zip(itertools.cycle(stores), planned, strict=False):
            write = await flip_instance(
                store, "chat", instance, role, namespace="default", reason="a scenario"
            )
            delays_s.append(await asyncio.to_thread(_measure_acknowledgement_s, state, write))
    return delays_s


def _measure_acknowledgement_s(state: StatePort, write: AssignmentWrite) -> float:
    seen = state.read(min_generation=write.generation)
    assert seen.generation == write.generation
    return seen.acknowledged_at_s - write.entry.since


@pytest.mark.timeout(600)
async def test_4_restarts_of_engines_that_keep_one_role_fail_no_request(
    cluster: Cluster,
    manual_service: DeployedService,
    load: Load,
    record_measurement: RecordMeasurement,
    seed: int,
) -> None:
    with load.window("engines started for one role each") as changed:
        manual_service.patch("pdservices", {"spec": {"autoscaling": {"flip": {"strategy": "Restart"}}}})
        wait_for(lambda: _all_use_strategy(manual_service, "Restart"), "engines that restart", timeout_s=120)
        manual_service.wait_until_ready(timeout_s=60)
    planned = generate_flips(manual_service, random.Random(seed))
    async with open_store(f"kubeconfig:{cluster.kubeconfig}") as store:
        with load.window(f"{RESTART_FLIPS} flips, Restart") as window:
            for instance, role in itertools.islice(planned, RESTART_FLIPS):
                await flip_instance(store, "chat", instance, role, namespace="default", reason="a scenario")
                took_s = await asyncio.to_thread(_wait_for_role, manual_service, instance, role)
                record_measurement(f"flip by a restart: {instance} serves {role} after {took_s:.1f} s")
        with load.window("operator killed while an engine starts for its other role") as killed:
            instance, role = next(planned)
            await flip_instance(store, "chat", instance, role, namespace="default", reason="a scenario")
            await asyncio.to_thread(_kill_operator_during_switch, cluster, manual_service, instance)
            await asyncio.to_thread(_wait_for_role, manual_service, instance, role)
    assert (changed.all_succeeded(), window.all_succeeded(), killed.all_succeeded()) == (True, True, True)


def _wait_for_role(service: DeployedService, instance: str, role: Role) -> float:
    took_s = wait_for(lambda: service.serves_role(instance, role), f"{instance} as {role}", timeout_s=60)
    service.wait_until_ready()
    return took_s


def _kill_operator_during_switch(cluster: Cluster, service: DeployedService, instance: str) -> None:
    """Whether the engine has ended and no new engine serves yet."""
    victim = find_leading_operator(cluster)
    wait_for(
        lambda: service.instances()[instance]["phase"] == "Switching", "the restart to flip", timeout_s=60
    )
    signal_pod(cluster, victim, signal.SIGKILL)
    assert service.instances()[instance]["phase"] in ("Switching", "Verifying")
    wait_for(lambda: has_restarted(cluster, victim), "the operator to be back", timeout_s=60)


@pytest.mark.timeout(480)
def test_flip_and_drain_commands_with_wait_return_when_they_took_effect_and_fail_no_request(
    cluster: Cluster, manual_service: DeployedService, load: Load, tmp_path: Path
) -> None:
    fulcrum = CommandLine(cluster.kubeconfig, tmp_path, "default")
    name = min(
        name for name, entry in manual_service.read_assignment_entries().items() if entry["role"] == "Prefill"
    )
    with load.window("flipped, drained and taken back by commands") as window:
        done = [
            fulcrum("flip", name, "--to", "decode", "--pin", "5s", "--wait"),
            fulcrum("drain", name, "--wait"),
            fulcrum("drain", name, "--undo"),
        ]
        wait_for(lambda: manual_service.serves_role(name, "Decode"), "it to serve again", timeout_s=30)
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 3
    expected = [
        f"{name} → Decode, pinned for 5s: serves Decode ",
        "; drained, no request is left on it",
        "gets new requests again",
    ]
    assert [text in one.stdout for text, one in zip(expected, done, strict=True)] == [True] * 3, done
    assert window.all_succeeded()


def _all_use_strategy(service: DeployedService, strategy: str) -> bool:
    return {status.get("flipStrategy") for status in service.instances().values()} == {strategy}
