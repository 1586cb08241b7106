"""The client handles rare responses of API servers: pages, overload, expired tokens, invalid objects."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fulcrum_cluster.client import ClusterClient
from fulcrum_cluster.client_config import ClientConfig
from fulcrum_cluster.informer import Informer
from fulcrum_cluster.objects import NODE, POD
from fulcrum_core.api import PDService, QoSTier
from fulcrum_core.errors import Forbidden, StoreUnavailable
from fulcrum_core.ports import EventType

Response = Callable[[web.Request], web.Response]


class ScriptedServer:
    """An API server that sends these responses in order, and repeats the last one."""

    def __init__(self, *responses: Response) -> None:
        self.responses = list(responses)
        self.requests: list[web.Request] = []

    async def respond(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        return (self.responses.pop(0) if len(self.responses) > 1 else self.responses[0])(request)


class RotatingToken:
    """A token that changes each time the server refuses it."""

    def __init__(self) -> None:
        self.refusals = 0

    async def authorization_header(self) -> str:
        return f"Bearer {self.refusals}"

    def invalidate(self) -> None:
        self.refusals += 1


def page(names: str, *, more: str = "") -> Response:
    items = [{"metadata": {"name": name, "namespace": "default"}} for name in names]
    return lambda _: web.json_response(
        {"metadata": {"resourceVersion": "7", "continue": more}, "items": items}
    )


def failure(code: int, *, wait_s: str = "") -> Response:
    headers = {"retry-after": wait_s} if wait_s else {}
    return lambda _: web.json_response({"code": code, "message": "m"}, status=code, headers=headers)


@asynccontextmanager
async def cluster(
    folder: Path, script: ScriptedServer, token: RotatingToken | None = None
) -> AsyncIterator[ClusterClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.respond)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "s")).start()
    async with ClusterClient(ClientConfig(url="http://api", socket=folder / "s", token=token)) as found:
        yield found
    await runner.cleanup()


async def pods(found: ClusterClient) -> list[str]:
    items, version = await found.objects.list(POD, namespace="default")
    assert version == "7"
    return [item["metadata"]["name"] for item in items]


async def test_pages_are_joined_into_one_list(tmp_path: Path) -> None:
    script = ScriptedServer(page("ab", more="x"), page("cd", more="y"), page("e"))
    async with cluster(tmp_path, script) as found:
        assert await pods(found) == ["a", "b", "c", "d", "e"]
    assert [request.query.get("continue") for request in script.requests] == [None, "x", "y"]


async def test_a_list_of_large_objects_keeps_what_is_asked_for_of_each_page(tmp_path: Path) -> None:
    script = ScriptedServer(page("ab", more="x"), page("c"))
    async with cluster(tmp_path, script) as found:
        kept, _ = await found.objects.list(
            NODE, namespace="", keep=lambda node: {"name": node["metadata"]["name"]}
        )
    assert kept == [{"name": "a"}, {"name": "b"}, {"name": "c"}]
    assert [request.query.get("limit") for request in script.requests] == ["100", "100"]


async def test_list_is_requested_without_pages_if_a_page_has_expired(tmp_path: Path) -> None:
    script = ScriptedServer(page("ab", more="x"), failure(410), page("abc"))
    async with cluster(tmp_path, script) as found:
        assert await pods(found) == ["a", "b", "c"]
    assert [request.query.get("limit") for request in script.requests] == ["500", "500", None]


async def test_request_is_retried_after_the_delay_that_an_overloaded_server_names(tmp_path: Path) -> None:
    async with cluster(tmp_path, ScriptedServer(failure(429, wait_s="0"), page("a"))) as found:
        assert await pods(found) == ["a"]


@pytest.mark.parametrize(
    ("response", "wait_s"),
    [
        pytest.param(failure(429, wait_s="60"), 60.0, id="overloaded for a long time"),
        pytest.param(failure(429, wait_s="0"), 0.0, id="overloaded each time"),
        pytest.param(failure(503, wait_s="5"), 5.0, id="not available yet"),
        pytest.param(failure(503), None, id="not available, without a retry delay"),
        pytest.param(lambda _: web.Response(status=502, text="proxy"), None, id="the error page of a proxy"),
    ],
)
async def test_server_error_raises_store_unavailable_with_the_retry_delay(
    tmp_path: Path, response: Response, wait_s: float | None
) -> None:
    async with cluster(tmp_path, ScriptedServer(response)) as found:
        with pytest.raises(StoreUnavailable) as away:
            await pods(found)
    assert (away.value.retry_after_s or None) == (wait_s or None)


async def test_responses_are_counted_by_method_and_status(tmp_path: Path) -> None:
    async with cluster(tmp_path, ScriptedServer(failure(429, wait_s="0"), page("a"), failure(503))) as found:
        await pods(found)
        with pytest.raises(StoreUnavailable):
            await found.objects.delete(POD, "a", namespace="default")
        assert found.responses == {("GET", 429): 1, ("GET", 200): 1, ("DELETE", 503): 1}
    async with ClusterClient(ClientConfig(url="http://api", socket=tmp_path / "missing")) as away:
        with pytest.raises(StoreUnavailable):
            await pods(away)
        assert away.responses == {("GET", 0): 1}


async def test_request_is_retried_with_a_renewed_token(tmp_path: Path) -> None:
    script = ScriptedServer(failure(401), page("a"))
    async with cluster(tmp_path, script, RotatingToken()) as found:
        assert await pods(found) == ["a"]
    assert [request.headers["authorization"] for request in script.requests] == ["Bearer 0", "Bearer 1"]


async def test_request_is_retried_only_once_if_the_token_stays_refused(tmp_path: Path) -> None:
    script = ScriptedServer(failure(401))
    async with cluster(tmp_path, script, RotatingToken()) as found:
        with pytest.raises(Forbidden, match="does not accept these credentials"):
            await pods(found)
    assert len(script.requests) == 2


def tiers(*specs: Any) -> Response:
    items = [
        {
            "apiVersion": "fulcrum.dev/v1alpha1",
            "kind": "QoSTier",
            "metadata": {"name": f"t-{number}", "namespace": "default", "resourceVersion": str(number + 1)},
            "spec": spec,
        }
        for number, spec in enumerate(specs)
    ]
    return lambda _: web.json_response({"metadata": {"resourceVersion": "7"}, "items": items})


def events(*made: tuple[str, dict[str, Any]]) -> Response:
    text = "".join(json.dumps({"type": kind, "object": body}) + "\n" for kind, body in made)
    return lambda _: web.Response(text=text, content_type="application/json")


def tier(number: int, version: str, spec: Any) -> dict[str, Any]:
    metadata = {"name": f"t-{number}", "namespace": "default", "resourceVersion": version}
    return {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "QoSTier", "metadata": metadata, "spec": spec}


async def test_unknown_field_of_a_newer_writer_is_ignored(tmp_path: Path) -> None:
    async with cluster(tmp_path, ScriptedServer(tiers({"priority": 1, "new": True}))) as found:
        listing = await found.store.list(QoSTier, namespace="default")
    assert [(obj.metadata.name, obj.spec.priority) for obj in listing.items] == [("t-0", 1)]


async def test_list_returns_readable_objects_and_names_unreadable_ones(tmp_path: Path) -> None:
    async with cluster(tmp_path, ScriptedServer(tiers({"priority": "high"}, {"priority": 2}))) as found:
        listing = await found.store.list(QoSTier, namespace="default")
    assert [obj.metadata.name for obj in listing.items] == ["t-1"]
    assert listing.unreadable == (("default", "t-0"),)


async def test_unreadable_change_does_not_end_the_watch(tmp_path: Path) -> None:
    made = events(
        ("MODIFIED", tier(0, "8", {"priority": "high"})), ("MODIFIED", tier(1, "9", {"priority": 3}))
    )
    async with cluster(tmp_path, ScriptedServer(made)) as found:
        seen = [event async for event in found.store.watch(QoSTier, namespace="default", since="7")]
    assert [(event.type, event.unreadable, event.resource_version) for event in seen] == [
        (EventType.MODIFIED, ("default", "t-0"), "8"),
        (EventType.MODIFIED, None, "9"),
    ]


async def test_informer_keeps_the_last_readable_object_until_it_is_deleted(tmp_path: Path) -> None:
    slept: list[dict[str, int]] = []

    class AllResponsesSent(Exception):
        """Ends the test after the last response."""

    async def sleep(_: float) -> None:
        slept.append({name: obj.spec.priority for name, obj in informer.objects.items()})
        if len(slept) == 3:
            raise AllResponsesSent

    script = ScriptedServer(
        tiers({"priority": 1}, {"priority": 2}),
        events(("MODIFIED", tier(0, "8", {"priority": "high"}))),
        events(("ERROR", {"code": 410, "message": "too old"})),
        tiers({"priority": "high"}, {"priority": 2}),
        events(("DELETED", tier(0, "9", {"priority": "high"}))),
    )
    async with cluster(tmp_path, script) as found:
        informer = Informer(found.store, QoSTier, namespace="default", sleep=sleep)
        with pytest.raises(AllResponsesSent):
            await informer.run()
    assert slept == [{"t-0": 1, "t-1": 2}, {"t-0": 1, "t-1": 2}, {"t-1": 2}]
    assert informer.unreadable == frozenset()


async def test_missing_crd_is_named_in_the_error(tmp_path: Path) -> None:
    nothing: Response = lambda _: web.Response(status=404, text="404 page not found")  # noqa: E731
    async with cluster(tmp_path, ScriptedServer(nothing)) as found:
        with pytest.raises(Exception, match=r"/pdservices does not exist: is its CRD installed\?"):
            await found.store.list(PDService, namespace="default")


@pytest.mark.looptime
async def test_watch_without_response_headers_times_out(tmp_path: Path) -> None:
    """An API server that is starting accepts watches so; a watch that has begun may be silent for longer."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(hold, tmp_path / "s")
    begin_s = asyncio.get_running_loop().time()
    async with ClusterClient(
        ClientConfig(url="http://api", socket=tmp_path / "s"), idle_timeout_s=100
    ) as cluster:
        with pytest.raises(StoreUnavailable, match="sends no response headers"):
            await anext(cluster.store.watch(QoSTier, namespace="default", since="1"))
    assert asyncio.get_running_loop().time() - begin_s < 10
    server.close()
    await server.wait_closed()
