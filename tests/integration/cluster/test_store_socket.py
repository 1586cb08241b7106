"""The store's socket: its permissions, Kubernetes' REST semantics, and a client after the server ends."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from fulcrum_cluster.client import open_store
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.store_server import serve_store
from fulcrum_core.api import ObjectMeta, PDService, QoSTier, QoSTierSpec
from fulcrum_core.errors import InvalidInput, StoreUnavailable

TIERS = "/apis/fulcrum.dev/v1alpha1/namespaces/default/qostiers"
SERVICES = "/apis/fulcrum.dev/v1alpha1/namespaces/default/pdservices"
GOLD = QoSTier(metadata=ObjectMeta(name="gold"), spec=QoSTierSpec(priority=1))
MERGE = {"content-type": "application/merge-patch+json"}
APPLY = {"content-type": "application/apply-patch+yaml"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "store.sock"


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(SystemClock(), bookmark_interval_s=0.05, history=8)


@pytest.fixture
async def http(memory: MemoryStore, path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client, as curl is."""
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with (
        serve_store(memory, path),
        httpx.AsyncClient(transport=transport, base_url="http://store") as client,
    ):
        yield client


class TestSocket:
    async def test_socket_is_accessible_to_its_owner_only(self, memory: MemoryStore, path: Path) -> None:
        async with serve_store(memory, path):
            modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)]
        assert modes == [0o600, 0o700]

    async def test_socket_is_removed_when_the_server_ends(self, memory: MemoryStore, path: Path) -> None:
        async with serve_store(memory, path):
            assert path.is_socket()
        assert not path.exists()

    async def test_stale_socket_of_a_dead_process_is_replaced(self, memory: MemoryStore, path: Path) -> None:
        path.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(os.fspath(path))
        async with serve_store(memory, path), open_store(f"unix:{path}") as client:
            assert (await client.list(QoSTier, namespace="default")).items == ()

    async def test_socket_in_use_is_not_taken_over(self, memory: MemoryStore, path: Path) -> None:
        async with serve_store(memory, path):
            with pytest.raises(InvalidInput, match="in use"):
                async with serve_store(MemoryStore(SystemClock()), path):
                    pass
            async with open_store(f"unix:{path}") as client:
                await client.create(GOLD)

    async def test_socket_of_a_busy_process_is_not_taken_over(self, memory: MemoryStore, path: Path) -> None:
        path.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as pending:
            busy.bind(os.fspath(path))
            busy.listen(0)
            pending.connect(os.fspath(path))  # fills the queue of connections to be accepted
            with pytest.raises(InvalidInput, match="in use"):
                async with serve_store(memory, path):
                    pass
        assert path.is_socket()

    async def test_regular_file_at_the_socket_path_is_kept(self, memory: MemoryStore, path: Path) -> None:
        path.parent.mkdir()
        path.write_text("precious")
        with pytest.raises(InvalidInput, match="is a file"):
            async with serve_store(memory, path):
                pass
        assert path.read_text() == "precious"

    async def test_too_long_socket_path_is_refused(self, memory: MemoryStore, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="longer than the 107 bytes"):
            async with serve_store(memory, tmp_path / ("x" * 108)):
                pass

    async def test_open_watches_do_not_delay_shutdown(self, memory: MemoryStore, path: Path) -> None:
        async with open_store(f"unix:{path}") as client:
            async with serve_store(memory, path):
                since = (await client.list(QoSTier, namespace="default")).resource_version
                watch = client.watch(QoSTier, namespace="default", since=since)
                await anext(watch)
                began = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - began < 20.0  # a graceful shutdown would wait a minute
            with suppress(StoreUnavailable):  # the watch ends with or without an error, but it ends
                async with aclosing(watch), asyncio.timeout(20.0):
                    assert [event.object async for event in watch if event.object] == []


class TestClient:
    async def test_missing_socket_raises_store_unavailable(self, path: Path) -> None:
        async with open_store(f"unix:{path}") as client:
            with pytest.raises(StoreUnavailable, match=r"store\.sock does not respond"):
                await client.list(QoSTier, namespace="default")

    async def test_watch_on_a_missing_socket_raises_store_unavailable(self, path: Path) -> None:
        async with open_store(f"unix:{path}") as client:
            with pytest.raises(StoreUnavailable):
                await anext(client.watch(QoSTier, namespace="default", since="1"))

    async def test_watch_without_bookmarks_raises_store_unavailable(self, path: Path) -> None:
        silent = MemoryStore(SystemClock(), bookmark_interval_s=60.0)
        async with serve_store(silent, path), open_store(f"unix:{path}", idle_timeout_s=0.05) as client:
            since = (await client.list(QoSTier, namespace="default")).resource_version
            with pytest.raises(StoreUnavailable):
                await anext(client.watch(QoSTier, namespace="default", since=since))

    async def test_client_works_again_after_a_store_restart(self, memory: MemoryStore, path: Path) -> None:
        async with open_store(f"unix:{path}") as client:
            async with serve_store(memory, path):
                await client.create(GOLD)
            with pytest.raises(StoreUnavailable):
                await client.get(QoSTier, "gold", namespace="default")
            async with serve_store(memory, path):
                assert (await client.get(QoSTier, "gold", namespace="default")).spec == GOLD.spec

    @pytest.mark.parametrize("address", ["", "unix:", "/run/store.sock", "http://localhost"])
    def test_unknown_store_address_is_refused(self, address: str) -> None:
        with pytest.raises(InvalidInput, match="is not unix: and a path"):
            open_store(address)


class TestRest:
    async def test_yaml_manifest_is_applied_with_defaults(self, http: httpx.AsyncClient) -> None:
        text = "apiVersion: fulcrum.dev/v1alpha1\nkind: PDService\nmetadata: {name: chat}\nspec: {model: m}\n"
        response = await http.patch(
            f"{SERVICES}/chat", content=text, headers=APPLY, params={"fieldManager": "me"}
        )
        assert response.status_code == 200
        slo = {"ttft": "1s", "tpot": "50ms", "attainment": 99.0, "window": "5m"}
        assert response.json()["spec"]["slo"] == slo

    async def test_unquoted_yaml_time_is_accepted(self, http: httpx.AsyncClient) -> None:
        role = "{role: Decode, since: 2026-01-01T00:00:00Z, by: Person}"
        head = "apiVersion: fulcrum.dev/v1alpha1\nkind: PDAssignment\n"
        text = f"{head}spec: {{service: chat, roles: {{a: {role}}}}}"
        url = SERVICES.replace("pdservices", "pdassignments/chat")
        response = await http.patch(url, content=text, headers=APPLY, params={"fieldManager": "me"})
        assert response.json()["spec"]["roles"]["a"]["since"] == "2026-01-01T00:00:00.000000Z"

    async def test_list_response_has_the_list_kind_and_version(
        self, http: httpx.AsyncClient, memory: MemoryStore
    ) -> None:
        created = await memory.create(GOLD)
        assert (await http.get(TIERS)).json() == {
            "apiVersion": "fulcrum.dev/v1alpha1",
            "kind": "QoSTierList",
            "metadata": {"resourceVersion": created.metadata.resource_version},
            "items": [created.dump()],
        }

    async def test_created_object_is_returned_with_status_201(self, http: httpx.AsyncClient) -> None:
        assert (await http.post(TIERS, json=GOLD.dump())).status_code == 201

    async def test_watch_from_a_forgotten_version_ends_in_an_error_event(
        self, http: httpx.AsyncClient, memory: MemoryStore
    ) -> None:
        await memory.create(GOLD)
        for priority in range(2, 12):
            await memory.patch(QoSTier, "gold", {"spec": {"priority": priority}}, namespace="default")
        response = await http.get(TIERS, params={"watch": "true", "resourceVersion": "1"})
        event = json.loads(response.text)
        assert (response.status_code, event["type"], event["object"]["code"]) == (200, "ERROR", 410)

    async def test_bookmarks_are_sent_when_requested(
        self, http: httpx.AsyncClient, memory: MemoryStore
    ) -> None:
        since = (await memory.list(QoSTier, namespace="default")).resource_version
        query = {"watch": "true", "resourceVersion": since, "allowWatchBookmarks": "true"}
        async with http.stream("GET", TIERS, params=query) as response:
            event = json.loads(await anext(response.aiter_lines()))
        assert event == {
            "type": "BOOKMARK",
            "object": {
                "apiVersion": "fulcrum.dev/v1alpha1",
                "kind": "QoSTier",
                "metadata": {"resourceVersion": since},
            },
        }

    @pytest.mark.parametrize(
        ("method", "url", "options", "code", "reason"),
        [
            pytest.param("GET", f"{TIERS}/none", {}, 404, "NotFound", id="no such object"),
            pytest.param("GET", TIERS.replace("qostiers", "pods"), {}, 404, "NotFound", id="no such kind"),
            pytest.param("GET", f"{TIERS}?watch=true", {}, 422, "Invalid", id="a watch without a version"),
            pytest.param("POST", TIERS, {"content": "{"}, 422, "Invalid", id="not JSON"),
            pytest.param("POST", TIERS, {"content": "[]"}, 422, "Invalid", id="not an object"),
            pytest.param(
                "POST", TIERS, {"json": {"metadata": []}}, 422, "Invalid", id="metadata that is a list"
            ),
            pytest.param(
                "POST",
                TIERS,
                {"json": {"metadata": {"namespace": "x"}}},
                422,
                "Invalid",
                id="another namespace",
            ),
            pytest.param(
                "POST", f"{TIERS}?fieldValidation=Ignore", {"json": {}}, 422, "Invalid", id="lax validation"
            ),
            pytest.param(
                "PATCH", f"{TIERS}/gold", {"json": {}}, 422, "Invalid", id="a patch of unknown type"
            ),
            pytest.param(
                "PATCH",
                f"{TIERS}/gold",
                {"content": "{}", "headers": APPLY},
                422,
                "Invalid",
                id="an apply without a field manager",
            ),
            pytest.param(
                "PATCH",
                f"{TIERS}/gold?fieldManager=me",
                {"content": "a: [", "headers": APPLY},
                422,
                "Invalid",
                id="not YAML",
            ),
            pytest.param(
                "PATCH",
                f"{SERVICES}/chat?fieldManager=me",
                {"content": '{"spec": {"pools": {"a": {}}}}', "headers": APPLY},
                422,
                "Invalid",
                id="an object instead of a list",
            ),
            pytest.param(
                "PATCH",
                f"{TIERS}/gold?fieldManager=me",
                {"content": '{"metadata": {"name": "silver"}}', "headers": APPLY},
                422,
                "Invalid",
                id="another name",
            ),
            pytest.param(
                "PATCH",
                f"{TIERS}/gold",
                {"json": {"metadata": {"resourceVersion": "1"}}, "headers": MERGE},
                409,
                "Conflict",
                id="an old version",
            ),
            pytest.param("POST", TIERS, {"json": GOLD.dump()}, 409, "AlreadyExists", id="a name in use"),
        ],
    )
    async def test_refusal_is_a_kubernetes_status(
        self,
        http: httpx.AsyncClient,
        memory: MemoryStore,
        method: str,
        url: str,
        options: dict[str, Any],
        code: int,
        reason: str,
    ) -> None:
        await memory.create(GOLD)
        response = await http.request(method, url, **options)
        status = response.json()
        assert (response.status_code, status["kind"], status["code"], status["reason"]) == (
            code,
            "Status",
            code,
            reason,
        )

    async def test_refused_field_is_reported_in_status_details(self, http: httpx.AsyncClient) -> None:
        body = {**GOLD.dump(), "spec": {"priority": "high"}}
        response = await http.post(TIERS, json=body)
        assert response.json()["details"] == {
            "causes": [
                {
                    "reason": "FieldValueInvalid",
                    "field": "spec.priority",
                    "message": 'Invalid value: "high": is not a whole number',
                }
            ]
        }

    async def test_status_subresource_patches_status_only(
        self, http: httpx.AsyncClient, memory: MemoryStore
    ) -> None:
        manifest = {"metadata": {"name": "chat"}, "kind": "PDService", "spec": {"model": "m"}}
        await memory.create(PDService.model_validate(manifest))
        body = {"status": {"flips": 2}, "spec": {"model": "other"}}
        response = await http.patch(f"{SERVICES}/chat/status", json=body, headers=MERGE)
        assert (response.json()["status"]["flips"], response.json()["spec"]["model"]) == (2, "m")
