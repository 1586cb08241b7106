"""Levels 4 and 5 at once: real vLLM in restricted pods on two nodes, which hand KV over by their network."""

import itertools
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fulcrum_cli.local import engine_environment
from fulcrum_core.api import conditions as words
from tests.conftest import Figure
from tests.engines.asking import Answer, Ask, Way, alone, ask, every_kind, prompts, until_answered_by
from tests.engines.real import DEADLINE_S, START_S, require_engines
from tests.kubernetes.clusters import enforce_restricted
from tests.kubernetes.nodes.pods import list_pods
from tests.kubernetes.nodes.real_engines import (
    ENGINES,
    IMAGE,
    Claims,
    folders_of,
    manifest,
    readable_model,
)
from tests.kubernetes.nodes.router_state import StatePort, state_port
from tests.kubernetes.nodes.service import Service
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.images import system
from tools.kubernetes.machine import Machine
from tools.kubernetes.waiting import wait_for

REQUESTS = 8
VERIFIED_S = 60.0
NODE = "n1"
"""Where the client is."""


@pytest.fixture(scope="session")
def environment() -> Path:
    """The engine environment; without one the scenario is left out, and no cluster is started for it."""
    require_engines()
    return engine_environment()


@pytest.fixture
def claimed(
    environment: Path,
    cluster: Cluster,
    service: Service,  # noqa: ARG001 - the product is installed first
    namespace: str,
    tmp_path: Path,
) -> Iterator[Service]:
    """A service that its user has made all ready for, in a namespace of its own, and not applied yet."""
    archive = tmp_path / "vllm.tar"
    system(archive, IMAGE, environment)
    cluster.load_image(archive)
    enforce_restricted(cluster, namespace)
    model = readable_model(environment, tmp_path / "weights")
    claims = Claims(cluster, namespace, folders_of(environment, model))
    claims.make()
    chat = Service(cluster, namespace, "chat")
    try:
        yield chat
    finally:
        cluster.kubectl("delete", "pdservice", "chat", f"--namespace={namespace}", "--ignore-not-found")
        wait_for(lambda: chat.engines() == [], "the engines to end", timeout_s=60)
        claims.remove()


@dataclass(frozen=True, slots=True)
class Client:
    """Asks the service, and for what is right one of its engines, from a node."""

    node: Machine
    http: httpx.AsyncClient
    service: str

    async def ask(self, asked: Ask) -> Answer:
        """What the service answers."""
        with self.node.network():
            return await ask(self.http, self.service, asked)

    async def right(self, engine: str, asked: Ask) -> tuple[int, ...]:
        """The tokens of an engine that computes everything itself."""
        with self.node.network():
            return await alone(self.http, f"http://{engine}", asked)


@asynccontextmanager
async def client_of(cluster: Cluster, chat: Service) -> AsyncIterator[Client]:
    """A client on `NODE`."""
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
        yield Client(cluster.nodes[NODE], http, f"http://{chat.address()}")


@pytest.mark.timeout(900)
async def test_real_engines_on_two_nodes_hand_over_flip_and_hand_over(
    environment: Path, cluster: Cluster, claimed: Service, namespace: str, figure: Figure, seed: int
) -> None:
    chat, rng = claimed, random.Random(seed)
    ready_s = ready_after_s(cluster, namespace, manifest(environment))
    chat.wait_whole(ENGINES)
    assert len({pod.node for pod in chat.engines()}) == ENGINES
    read = chat.read("pdservices")["status"]["model"]["facts"]
    assert (read["dtype"], chat.condition(words.MODEL_FITS)["status"]) == ("float32", "True")
    with state_port(cluster, chat.address()) as state:
        wait_for(lambda: all_proven(state), "canaries in both directions", timeout_s=VERIFIED_S)
        async with client_of(cluster, chat) as client:
            there = await handed_over(client, chat, state, rng)
            flip_s = await first_right_token_s(client, chat, rng)
            back = await handed_over(client, chat, state, rng)
        assert (back, all_proven(state)) == (there[::-1], True)
    wait(cluster, namespace, words.KV_TRANSFER_VERIFIED, VERIFIED_S)
    printed = columns(cluster, namespace)
    assert (printed["READY"], printed["RATIO"], printed["KV"]) == ("2/2", "1:1", words.VERIFIED)
    figure(
        f"vLLM in pods on two nodes: apply to ready {ready_s:.0f} s, "
        f"flip to first right token {flip_s * 1000:.0f} ms"
    )


def ready_after_s(cluster: Cluster, namespace: str, body: dict[str, Any]) -> float:
    """How long it takes from `kubectl apply` to Ready; the error has what the engines said."""
    began_s = time.monotonic()
    cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=json.dumps(body))
    try:
        wait(cluster, namespace, words.READY, START_S)
    except RuntimeError as error:
        for pod in list_pods(cluster, namespace):
            error.add_note(cluster.kubectl("describe", "pod", f"--namespace={namespace}", pod.name))
            with suppress(RuntimeError):
                error.add_note(cluster.kubectl("logs", f"--namespace={namespace}", "--tail=40", pod.name))
        raise
    return time.monotonic() - began_s


def wait(cluster: Cluster, namespace: str, condition: str, timeout_s: float) -> None:
    """Until the condition is True, by a watch: polling costs what engines need that start."""
    limit = f"--timeout={timeout_s:.0f}s"
    cluster.kubectl(
        "wait", "pdservice/chat", f"--namespace={namespace}", f"--for=condition={condition}", limit
    )


def columns(cluster: Cluster, namespace: str) -> dict[str, str]:
    """What `kubectl get` prints of the service."""
    head, row = cluster.kubectl("get", "pdservice", "chat", f"--namespace={namespace}").splitlines()
    begins = [found.start() for found in re.finditer(r"\S+", head)]
    parts = itertools.pairwise([*begins, len(row)])
    return {head[begin:end].strip(): row[begin:end].strip() for begin, end in parts}


async def handed_over(client: Client, chat: Service, state: StatePort, rng: random.Random) -> tuple[str, str]:
    """The way that requests take, all with the right tokens; the router counts each as proven."""
    way, asked = way_of(chat), every_kind(rng, REQUESTS)
    engine, before = chat.instances()[way[1]]["endpoint"], proven(state)[way]
    right = [await client.right(engine, one) for one in asked]
    answers = [await client.ask(one) for one in asked]
    assert [(answer.status, answer.tokens) for answer in answers] == [(200, tokens) for tokens in right]
    assert [(answer.way, answer.local) for answer in answers] == [(way, None)] * REQUESTS
    try:
        wait_for(lambda: proven(state)[way] >= before + REQUESTS, "proofs of all hand-offs", timeout_s=10)
    except TimeoutError as error:
        error.add_note(f"{before} before; {state.read().pairs}, {[answer.usage for answer in answers]}")
        raise
    return way


async def first_right_token_s(client: Client, chat: Service, rng: random.Random) -> float:
    """From the write of a flip of both to the first token of a request that took the new way."""
    way, asked = way_of(chat), Ask(prompts(rng, 1, (60, 60))[0], 1)
    right = await client.right(chat.instances()[way[1]]["endpoint"], asked)
    began_s = chat.swap()
    await until_answered_by(way[::-1], client.ask, asked, right)
    return time.monotonic() - began_s


def way_of(chat: Service) -> tuple[str, str]:
    """The way that the assignment wishes."""
    names = {entry["role"]: name for name, entry in chat.roles().items()}
    return names["Prefill"], names["Decode"]


def proven(state: StatePort) -> dict[Way, int]:
    """How many hand-offs each way has had that were proven."""
    return {(pair.prefill, pair.decode): pair.proven for pair in state.read().pairs}


def all_proven(state: StatePort) -> bool:
    """Whether each way there is was proven, and by the last hand-off, too."""
    pairs = state.read().pairs
    return [pair.last_reason for pair in pairs] == [words.PROVEN] * (ENGINES * (ENGINES - 1))
