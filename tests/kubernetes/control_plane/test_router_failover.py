"""Two routers over a real API server: one has the traffic, the other follows, and clients notice little."""

import json
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from fulcrum_core.state import RouterState
from fulcrum_simulator.text import output_text, prompt_digest
from tests.kubernetes.control_plane.routed import (
    MODEL,
    Process,
    Router,
    Stack,
    engine_servers,
    routed,
    stop,
)
from tools.kubernetes.cluster import API_SERVER, Cluster
from tools.kubernetes.waiting import wait_for

FOLLOWS_S = 5.0
TOKENS = 4
ALL = {"chat-0", "chat-1", "chat-2", "chat-3"}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Process]]:
    with engine_servers() as started:
        yield started


@pytest.fixture
def stack(control_plane: Cluster, namespace: str, engines: dict[str, Process]) -> Iterator[Stack]:
    with routed(control_plane, namespace, engines) as made:
        yield made


@pytest.fixture
def pair(stack: Stack) -> tuple[Router, Router]:
    """The active router and a warm standby."""
    both = stack.start_router(), stack.start_router()
    for router in both:
        router.process.ready()
    wait_for(lambda: bool(stack.directed_to()), "one of them to be active", timeout_s=20)
    [address] = stack.directed_to()
    standby, active = sorted(both, key=lambda router: router.address == address)
    wait_for(lambda: stack.serving(active) == ALL, "it to know all", timeout_s=20)
    return active, standby


def answers(router: Router, prompt: str = "hello") -> bool:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS}
    answer = httpx.post(router.url, json=body, timeout=20, trust_env=False)
    right = output_text(prompt_digest(prompt.encode()), TOKENS)
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == right


def test_the_standby_is_warm_but_has_nothing_to_tell(stack: Stack, pair: tuple[Router, Router]) -> None:
    _, standby = pair
    wait_for(lambda: answers(standby), "the standby to serve who asks all the same", timeout_s=10)
    assert stack.state(standby) == 503
    active, token, stack.token = stack.state(pair[0]), stack.token, "nonsense"
    assert isinstance(active, RouterState)
    assert (stack.state(pair[0]), stack.directed_to(), token != "") == (401, [pair[0].address], True)


def test_a_killed_router_is_followed_in_time_by_one_whose_ledger_begins_then(
    stack: Stack, pair: tuple[Router, Router]
) -> None:
    active, standby = pair
    before_s = time.time()
    active.process.kill()
    took_s = wait_for(lambda: stack.directed_to() == [standby.address], "the takeover", timeout_s=20)
    assert took_s <= FOLLOWS_S
    assert answers(standby)
    state = stack.state(standby)
    assert isinstance(state, RouterState)
    assert state.since_s > before_s
    metrics = httpx.get(standby.url.replace("/v1/completions", "/metrics"), trust_env=False).text
    assert "fulcrum_router_takeovers_total 1.0" in metrics


def test_one_that_is_told_to_end_hands_over_first_and_loses_nothing(
    stack: Stack, pair: tuple[Router, Router]
) -> None:
    """New connections are served until the successor has the traffic for a while, streams to their end."""
    active, standby = pair
    streamed: list[bytes] = []
    body = {"model": MODEL, "prompt": "a long answer", "max_tokens": 500, "stream": True}

    def stream() -> None:
        with httpx.stream("POST", active.url, json=body, timeout=60, trust_env=False) as answer:
            streamed.extend(answer.iter_raw())

    client = threading.Thread(target=stream)
    client.start()
    wait_for(lambda: bool(streamed), "the stream to begin", timeout_s=20)
    active.process.popen.send_signal(signal.SIGTERM)
    took_s = wait_for(lambda: stack.directed_to() == [standby.address], "the hand-over", timeout_s=20)
    assert took_s < 2.0
    assert answers(active), "whoever has not heard yet is served"
    assert answers(standby)
    assert active.process.popen.wait(30) == 0
    client.join()
    assert b"".join(streamed).endswith(b"data: [DONE]\n\n")


def test_the_last_one_ends_in_its_window(stack: Stack) -> None:
    only = stack.start_router()
    only.process.ready()
    wait_for(lambda: stack.directed_to() == [only.address], "it to be active", timeout_s=20)
    code, took_s = stop(only.process, signal.SIGTERM, patience_s=20)
    assert (code, took_s < 7.0) == (0, True)


def test_nothing_changes_while_the_api_server_is_away_nor_when_it_is_back(
    stack: Stack, pair: tuple[Router, Router]
) -> None:
    active, standby = pair
    stack.cluster.kill_part(API_SERVER)
    try:
        end_s = time.monotonic() + 6.0
        while time.monotonic() < end_s:
            assert answers(active)
        assert isinstance(stack.state(active), RouterState)
    finally:
        stack.cluster.start_part(API_SERVER)
    generation = flip(stack, "chat-0", "Decode")
    state = stack.state(active, min_generation=generation, timeout_s=20)
    assert isinstance(state, RouterState)
    assert (state.generation, stack.state(standby), stack.directed_to()) == (
        generation,
        503,
        [active.address],
    )


def test_a_pod_that_is_deleted_gets_no_new_work_while_nobody_else_acts(
    stack: Stack, pair: tuple[Router, Router]
) -> None:
    """Its PDInstance still says Serving: there is no operator here."""
    path = stack.path("v1", "pods", "chat-3")
    stack.patch(path, {"metadata": {"finalizers": ["fulcrum.dev/held-by-a-test"]}})
    stack.cluster.request("DELETE", path)
    wait_for(lambda: stack.serving(pair[0]) == ALL - {"chat-3"}, "it to be passed over", timeout_s=5)
    stack.patch(path, {"metadata": {"finalizers": None}})
    stack.cluster.request("DELETE", stack.path("v1", "pods", "chat-2"))
    wait_for(lambda: stack.serving(pair[0]) == {"chat-0", "chat-1"}, "the next one, too", timeout_s=5)
    assert answers(pair[0])


def flip(stack: Stack, name: str, role: str) -> int:
    """Patch the assignment as a person does; its new generation."""
    wish = {"spec": {"roles": {name: {"role": role, "by": "Person"}}}}
    patched = stack.patch(stack.path("fulcrum.dev/v1alpha1", "pdassignments", "chat"), wish)
    return int(json.dumps(patched["metadata"]["generation"]))
