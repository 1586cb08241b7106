"""Two routers and a real API server: one is active, the other takes over, and clients lose no request."""

import json
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from fulcrum_core.router_state import ROUTER_HANDOVER_TIMEOUT_S, RouterState
from fulcrum_simulator.text import output_text, prompt_digest
from tests.kubernetes.control_plane.service_stack import (
    MODEL,
    Process,
    RoutedService,
    RouterProcess,
    engine_servers,
    routed,
    stop,
)
from tools.kubernetes.cluster import API_SERVER, Cluster
from tools.kubernetes.waiting import wait_for

TAKEOVER_MAX_S = 5.0
TOKENS = 4
ALL = {"chat-0", "chat-1", "chat-2", "chat-3"}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Process]]:
    with engine_servers() as started:
        yield started


@pytest.fixture
def service(control_plane: Cluster, namespace: str, engines: dict[str, Process]) -> Iterator[RoutedService]:
    with routed(control_plane, namespace, engines) as made:
        yield made


@pytest.fixture
def pair(service: RoutedService) -> tuple[RouterProcess, RouterProcess]:
    """The active router and a warm standby."""
    both = service.start_router(), service.start_router()
    for router in both:
        router.process.wait_ready()
    wait_for(lambda: bool(service.slice_addresses()), "one router to be active", timeout_s=20)
    [address] = service.slice_addresses()
    standby, active = sorted(both, key=lambda router: router.address == address)
    wait_for(lambda: service.serving(active) == ALL, "the active router to know all instances", timeout_s=20)
    return active, standby


def serves_correctly(router: RouterProcess, prompt: str = "hello") -> bool:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS}
    response = httpx.post(router.url, json=body, timeout=20, trust_env=False)
    right = output_text(prompt_digest(prompt.encode()), TOKENS)
    return response.status_code == 200 and response.json()["choices"][0]["text"] == right


def test_the_standby_serves_requests_but_not_its_state(
    service: RoutedService, pair: tuple[RouterProcess, RouterProcess]
) -> None:
    _, standby = pair
    wait_for(lambda: serves_correctly(standby), "the standby to serve requests that reach it", timeout_s=10)
    assert service.state(standby) == 503
    active, token, service.token = service.state(pair[0]), service.token, "nonsense"
    assert isinstance(active, RouterState)
    assert (service.state(pair[0]), service.slice_addresses(), token != "") == (401, [pair[0].address], True)


def test_a_killed_router_is_replaced_in_time_by_one_with_a_new_ledger(
    service: RoutedService, pair: tuple[RouterProcess, RouterProcess]
) -> None:
    active, standby = pair
    before_s = time.time()
    active.process.kill()
    took_s = wait_for(lambda: service.slice_addresses() == [standby.address], "the takeover", timeout_s=20)
    assert took_s <= TAKEOVER_MAX_S
    assert serves_correctly(standby)
    state = service.state(standby)
    assert isinstance(state, RouterState)
    assert state.ledger_since_s > before_s
    metrics_url = f"http://127.0.0.1:{standby.process.ports['metrics_port']}/metrics"
    metrics = httpx.get(metrics_url, trust_env=False).text
    assert "fulcrum_router_takeovers_total 1.0" in metrics


def test_a_terminated_router_hands_over_first_and_drops_no_request(
    service: RoutedService, pair: tuple[RouterProcess, RouterProcess]
) -> None:
    """New connections are served until the successor has the traffic for a while, streams to their end."""
    active, standby = pair
    streamed: list[bytes] = []
    body = {"model": MODEL, "prompt": "a long response", "max_tokens": 500, "stream": True}

    def stream() -> None:
        with httpx.stream("POST", active.url, json=body, timeout=60, trust_env=False) as response:
            streamed.extend(response.iter_raw())

    client = threading.Thread(target=stream)
    client.start()
    wait_for(lambda: bool(streamed), "the stream to begin", timeout_s=20)
    active.process.popen.send_signal(signal.SIGTERM)
    took_s = wait_for(lambda: service.slice_addresses() == [standby.address], "the handover", timeout_s=20)
    assert took_s < 2.0
    assert serves_correctly(active), "clients that do not know the successor yet are served"
    assert serves_correctly(standby)
    assert active.process.popen.wait(30) == 0
    client.join()
    assert b"".join(streamed).endswith(b"data: [DONE]\n\n")


def test_the_last_router_exits_within_the_handover_timeout(service: RoutedService) -> None:
    only = service.start_router()
    only.process.wait_ready()
    wait_for(lambda: service.slice_addresses() == [only.address], "the router to be active", timeout_s=20)
    longest_s = ROUTER_HANDOVER_TIMEOUT_S + 5.0
    code, took_s = stop(only.process, signal.SIGTERM, timeout_s=longest_s + 10.0)
    assert (code, took_s < longest_s) == (0, True)


def test_the_active_router_stays_active_through_an_api_server_outage(
    service: RoutedService, pair: tuple[RouterProcess, RouterProcess]
) -> None:
    active, standby = pair
    service.cluster.kill_component(API_SERVER)
    try:
        end_s = time.monotonic() + 6.0
        while time.monotonic() < end_s:
            assert serves_correctly(active)
        assert isinstance(service.state(active), RouterState)
    finally:
        service.cluster.start_component(API_SERVER)
    generation = flip(service, "chat-0", "Decode")
    state = service.state(active, min_generation=generation, timeout_s=20)
    assert isinstance(state, RouterState)
    assert (state.generation, service.state(standby), service.slice_addresses()) == (
        generation,
        503,
        [active.address],
    )


def test_a_deleted_pod_gets_no_new_work_without_an_operator(
    service: RoutedService, pair: tuple[RouterProcess, RouterProcess]
) -> None:
    """The phase of its PDInstance remains Serving, since no operator runs here."""
    path = service.path("v1", "pods", "chat-3")
    service.patch(path, {"metadata": {"finalizers": ["fulcrum.dev/held-by-a-test"]}})
    service.cluster.request("DELETE", path)
    wait_for(lambda: service.serving(pair[0]) == ALL - {"chat-3"}, "chat-3 to get no work", timeout_s=5)
    service.patch(path, {"metadata": {"finalizers": None}})
    service.cluster.request("DELETE", service.path("v1", "pods", "chat-2"))
    wait_for(lambda: service.serving(pair[0]) == {"chat-0", "chat-1"}, "chat-2 to get no work", timeout_s=5)
    assert serves_correctly(pair[0])


def flip(service: RoutedService, name: str, role: str) -> int:
    """Patch the assignment as a person does and return its new generation."""
    patch = {"spec": {"roles": {name: {"role": role, "by": "Person"}}}}
    patched = service.patch(service.path("fulcrum.dev/v1alpha1", "pdassignments", "chat"), patch)
    return int(json.dumps(patched["metadata"]["generation"]))
