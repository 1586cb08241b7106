"""The autoscaler over a real API server: it finds services itself and reads routers by its own token."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kubernetes.control_plane.service_stack import (
    SERVICE,
    Process,
    RoutedService,
    engine_servers,
    routed,
    stop,
)
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for


@pytest.fixture
def stack(control_plane: Cluster, namespace: str) -> Iterator[RoutedService]:
    with engine_servers(2) as engines, routed(control_plane, namespace, engines) as made:
        yield made


@pytest.fixture
def token_file(stack: RoutedService, tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(stack.token)
    return path


def decisions(autoscaler: Process, **query: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{autoscaler.ports['port']}/decisions"
    found: list[dict[str, Any]] = json.loads(httpx.get(url, params=query, trust_env=False).content)
    return found


def test_the_autoscaler_decides_from_the_state_of_a_router_that_accepts_its_token(
    stack: RoutedService, token_file: Path
) -> None:
    router = stack.start_router()
    router.process.wait_ready()
    wait_for(lambda: stack.serving(router) == set(stack.engines), "the router to know all", timeout_s=20)
    autoscaler = Process.start(
        "fulcrum_autoscaler",
        *("--store", stack.store, "--service", SERVICE, "--namespace", stack.namespace),
        *("--router-state", router.state_url, "--token-file", str(token_file)),
    )
    try:
        autoscaler.wait_ready()
        wait_for(
            lambda: any("cannot decide" not in decision["reason"] for decision in decisions(autoscaler)),
            "a decision from the router's state",
            timeout_s=20,
        )
        router.process.kill()  # no standby runs, so there is no state to decide from
        before = len(decisions(autoscaler))
        wait_for(lambda: len(decisions(autoscaler)) > before + 2, "further decisions", timeout_s=20)
        assert {decision["action"] for decision in decisions(autoscaler)[before + 1 :]} == {"hold"}
        assert stop(autoscaler, signal.SIGTERM, timeout_s=10)[0] == 0
    finally:
        autoscaler.kill()


def test_without_a_service_name_the_autoscaler_acts_on_every_existing_service(
    stack: RoutedService, token_file: Path
) -> None:
    autoscaler = Process.start("fulcrum_autoscaler", "--store", stack.store, "--token-file", str(token_file))
    ours = {"namespace": stack.namespace, "service": SERVICE}
    try:
        autoscaler.wait_ready()
        url = f"http://127.0.0.1:{autoscaler.ports['port']}"
        wait_for(lambda: bool(decisions(autoscaler, **ours)), "a decision", timeout_s=20)
        assert decisions(autoscaler, **ours)[-1]["action"] == "hold"
        assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
        stack.cluster.request("DELETE", stack.path("fulcrum.dev/v1alpha1", "pdservices", SERVICE))
        wait_for(lambda: not decisions(autoscaler, **ours), "its end", timeout_s=20)
        wait_for(
            lambda: f'service="{SERVICE}"' not in httpx.get(f"{url}/metrics", trust_env=False).text,
            "its series to go",
            timeout_s=15,
        )
    finally:
        autoscaler.kill()
