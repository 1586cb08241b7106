"""Levels 4 and 5 together: vLLM in restricted pods on two nodes, with KV transfers over the network."""

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

from fulcrum_cli.local.engine_environment import find_engine_environment
from fulcrum_core.api import conditions
from tests.conftest import RecordMeasurement
from tests.engines.completions import (
    CompletionRequest,
    CompletionResponse,
    Route,
    compute_reference_tokens,
    generate_mixed_requests,
    generate_prompts,
    send,
    send_until_routed,
)
from tests.engines.services import DEADLINE_S, MODEL, START_S, require_engines
from tests.kubernetes.clusters import enforce_restricted_pod_security
from tests.kubernetes.nodes import fake_hub
from tests.kubernetes.nodes.pods import list_pods
from tests.kubernetes.nodes.real_engines import (
    ENGINES,
    IMAGE,
    VolumeClaims,
    build_manifest,
    copy_model_for_all_users,
    list_claim_folders,
)
from tests.kubernetes.nodes.router_state import StatePort, open_state_port
from tests.kubernetes.nodes.service import DeployedService
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.images import build_system_image
from tools.kubernetes.machine import Machine
from tools.kubernetes.waiting import wait_for

REQUESTS = 8
VERIFICATION_TIMEOUT_S = 60.0
CLIENT_NODE = "n1"
"""Node of the client."""


@pytest.fixture(scope="session")
def environment() -> Path:
    """The engine environment; skips without one, before a cluster is started."""
    require_engines()
    return find_engine_environment()


@pytest.fixture
def prepared_service(
    environment: Path,
    cluster: Cluster,
    service: DeployedService,  # noqa: ARG001 - Fulcrum is installed first
    namespace: str,
    tmp_path: Path,
) -> Iterator[DeployedService]:
    """A service in a namespace of its own, with claims and image, not applied yet."""
    archive = tmp_path / "vllm.tar"
    build_system_image(archive, IMAGE, environment)
    cluster.load_image(archive)
    enforce_restricted_pod_security(cluster, namespace)
    model = copy_model_for_all_users(environment, tmp_path / "weights")
    claims = VolumeClaims(cluster, namespace, list_claim_folders(environment, model))
    claims.create()
    chat = DeployedService(cluster, namespace, "chat")
    try:
        yield chat
    finally:
        cluster.kubectl("delete", "pdservice", "chat", f"--namespace={namespace}", "--ignore-not-found")
        wait_for(lambda: chat.engines() == [], "the engines to end", timeout_s=60)
        claims.delete()


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests to the service, and to one engine for reference tokens, from a node."""

    node: Machine
    http: httpx.AsyncClient
    service: str

    async def send(self, request: CompletionRequest) -> CompletionResponse:
        """Send the request to the service."""
        with self.node.enter_network():
            return await send(self.http, self.service, request)

    async def compute_expected(self, engine: str, request: CompletionRequest) -> tuple[int, ...]:
        """Return the tokens of one engine that computes everything itself."""
        with self.node.enter_network():
            return await compute_reference_tokens(self.http, f"http://{engine}", request)


@asynccontextmanager
async def open_client(cluster: Cluster, chat: DeployedService) -> AsyncIterator[Client]:
    """A client on `CLIENT_NODE`."""
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
        yield Client(cluster.nodes[CLIENT_NODE], http, f"http://{chat.address()}")


@pytest.mark.timeout(900)
async def test_vllm_on_two_nodes_transfers_kv_before_and_after_a_flip(
    environment: Path,
    cluster: Cluster,
    prepared_service: DeployedService,
    namespace: str,
    record_measurement: RecordMeasurement,
    seed: int,
) -> None:
    chat, rng = prepared_service, random.Random(seed)
    ready_s = apply_and_wait_ready_s(cluster, namespace, build_manifest(environment))
    chat.wait_until_ready(ENGINES)
    assert len({pod.node for pod in chat.engines()}) == ENGINES
    read = chat.read("pdservices")["status"]["model"]["configExcerpt"]
    assert (read["dtype"], chat.condition(conditions.MODEL_FITS)["status"]) == ("float32", "True")
    with open_state_port(cluster, chat.address()) as state:
        wait_for(
            lambda: are_all_pairs_verified(state),
            "canaries in both directions",
            timeout_s=VERIFICATION_TIMEOUT_S,
        )
        async with open_client(cluster, chat) as client:
            there = await assert_kv_transfers(client, chat, state, rng)
            flip_s = await measure_flip_to_token_s(client, chat, rng)
            back = await assert_kv_transfers(client, chat, state, rng)
        assert (back, are_all_pairs_verified(state)) == (there[::-1], True)
    wait_for_condition(cluster, namespace, conditions.KV_TRANSFER_VERIFIED, VERIFICATION_TIMEOUT_S)
    printed = read_printed_columns(cluster, namespace)
    assert (printed["READY"], printed["RATIO"], printed["KV"]) == ("2/2", "1:1", conditions.VERIFIED)
    record_measurement(
        f"vLLM in pods on two nodes: apply to ready {ready_s:.0f} s, "
        f"flip to first right token {flip_s * 1000:.0f} ms"
    )


def apply_and_wait_ready_s(cluster: Cluster, namespace: str, body: dict[str, Any]) -> float:
    """Return the seconds from `kubectl apply` to Ready; the error's notes have the engines' logs."""
    began_s = time.monotonic()
    cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=json.dumps(body))
    try:
        wait_for_condition(cluster, namespace, conditions.READY, START_S)
    except RuntimeError as error:
        for pod in list_pods(cluster, namespace):
            error.add_note(cluster.kubectl("describe", "pod", f"--namespace={namespace}", pod.name))
            with suppress(RuntimeError):
                error.add_note(cluster.kubectl("logs", f"--namespace={namespace}", "--tail=40", pod.name))
        raise
    return time.monotonic() - began_s


def wait_for_condition(cluster: Cluster, namespace: str, condition: str, timeout_s: float) -> None:
    """Wait for the condition by a watch: polling would take CPU from the starting engines."""
    limit = f"--timeout={timeout_s:.0f}s"
    cluster.kubectl(
        "wait", "pdservice/chat", f"--namespace={namespace}", f"--for=condition={condition}", limit
    )


def read_printed_columns(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Return the columns of `kubectl get pds` for the service."""
    head, row = cluster.kubectl("get", "pdservice", "chat", f"--namespace={namespace}").splitlines()
    begins = [found.start() for found in re.finditer(r"\S+", head)]
    parts = itertools.pairwise([*begins, len(row)])
    return {head[begin:end].strip(): row[begin:end].strip() for begin, end in parts}


async def assert_kv_transfers(
    client: Client, chat: DeployedService, state: StatePort, rng: random.Random
) -> tuple[str, str]:
    """Return the route of requests; all have the right tokens and a verified KV transfer."""
    route, requests = read_route(chat), generate_mixed_requests(rng, REQUESTS)
    engine, before = chat.instances()[route[1]]["endpoint"], verified(state)[route]
    right = [await client.compute_expected(engine, one) for one in requests]
    responses = [await client.send(one) for one in requests]
    assert [(response.status, response.tokens) for response in responses] == [
        (200, tokens) for tokens in right
    ]
    assert [(response.route, response.local_prefill_reason) for response in responses] == [
        (route, None)
    ] * REQUESTS
    try:
        wait_for(
            lambda: verified(state)[route] >= before + REQUESTS, "all KV transfers verified", timeout_s=10
        )
    except TimeoutError as error:
        error.add_note(f"{before} before; {state.read().pairs}, {[response.usage for response in responses]}")
        raise
    return route


async def measure_flip_to_token_s(client: Client, chat: DeployedService, rng: random.Random) -> float:
    """Return the seconds from the flip of both to the first token of a request with the new route."""
    route, request = read_route(chat), CompletionRequest(generate_prompts(rng, 1, (60, 60))[0], 1)
    right = await client.compute_expected(chat.instances()[route[1]]["endpoint"], request)
    began_s = chat.swap_roles()
    await send_until_routed(route[::-1], client.send, request, right)
    return time.monotonic() - began_s


def read_route(chat: DeployedService) -> tuple[str, str]:
    """Return the route of the desired assignment."""
    names = {entry["role"]: name for name, entry in chat.read_assignment_entries().items()}
    return names["Prefill"], names["Decode"]


def verified(state: StatePort) -> dict[Route, int]:
    """Return the number of verified KV transfers of each pair."""
    return {(pair.prefill, pair.decode): pair.verified for pair in state.read().pairs}


def are_all_pairs_verified(state: StatePort) -> bool:
    """Whether each pair was verified, also by its last KV transfer."""
    pairs = state.read().pairs
    return [pair.last_reason for pair in pairs] == [conditions.VERIFIED] * (ENGINES * (ENGINES - 1))


DOWNLOAD = """
import os, pathlib, signal, socket
from huggingface_hub import hf_hub_download

path = hf_hub_download("acme/model", "model.safetensors")
(pathlib.Path(os.environ["HF_HUB_CACHE"]) / socket.gethostname()).write_text(path)
signal.pause()
"""
"""Downloads the weights as vLLM does, with the hub's library, and says so in the shared folder."""


def build_downloading_manifest(environment: Path) -> dict[str, Any]:
    """Return a PDService whose engines download another model into a claim, and serve nothing."""
    manifest = build_manifest(environment)
    spec = manifest["spec"]
    container = spec["pools"][0]["template"]["spec"]["containers"][0]
    container["command"] = [str(environment / "bin" / "python"), "-c", DOWNLOAD]
    container["args"] = []
    spec["model"], spec["modelSource"] = "acme/model", {"downloads": {"pvc": "downloads"}}
    spec["engine"]["env"] = [{"name": "HF_ENDPOINT", "value": fake_hub.ENDPOINT}]
    return manifest


@pytest.mark.timeout(600)
def test_engines_of_two_nodes_download_the_weights_once_into_a_shared_claim(
    environment: Path,
    cluster: Cluster,
    prepared_service: DeployedService,
    namespace: str,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    folder.chmod(0o777)
    claim = VolumeClaims(cluster, namespace, {"downloads": folder}, access="ReadWriteMany")
    claim.create()
    config = (environment / MODEL / "config.json").read_bytes()
    files = {"config.json": config, "model.safetensors": b"w" * 2**20}
    with fake_hub.serve_hub(cluster, "acme/model", files) as downloads:
        text = json.dumps(build_downloading_manifest(environment))
        cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=text)

        def finished() -> set[str]:
            return {path.name for path in folder.iterdir() if path.name.startswith("chat-")}

        wait_for(
            lambda: finished() == {"chat-0", "chat-1"}, "both engines to have the weights", timeout_s=240
        )
        nodes = {pod.node for pod in prepared_service.engines()}
    claim.delete()
    assert (len(nodes), downloads["model.safetensors"]) == (ENGINES, 1)
