"""What the client makes of answers that are seldom given: pages, haste, old tokens, odd objects."""

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
from fulcrum_cluster.objects import POD
from fulcrum_core.api import PDService, QoSTier
from fulcrum_core.errors import Forbidden, StoreUnavailable
from fulcrum_core.ports import EventType

Answer = Callable[[web.Request], web.Response]


class Script:
    """An API server that gives these answers, one after the other, and the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[web.Request] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        return (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(request)


class Changing:
    """A token that is another one after each refusal."""

    def __init__(self) -> None:
        self.refusals = 0

    async def authorization_header(self) -> str:
        return f"Bearer {self.refusals}"

    def invalidate(self) -> None:
        self.refusals += 1


def page(names: str, *, more: str = "") -> Answer:
    items = [{"metadata": {"name": name, "namespace": "default"}} for name in names]
    return lambda _: web.json_response(
        {"metadata": {"resourceVersion": "7", "continue": more}, "items": items}
    )


def failure(code: int, *, wait_s: str = "") -> Answer:
    headers = {"retry-after": wait_s} if wait_s else {}
    return lambda _: web.json_response({"code": code, "message": "m"}, status=code, headers=headers)


@asynccontextmanager
async def cluster(
    folder: Path, script: Script, token: Changing | None = None
) -> AsyncIterator[ClusterClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.answer)
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


async def test_a_list_in_pages_is_one_list(tmp_path: Path) -> None:
    script = Script(page("ab", more="x"), page("cd", more="y"), page("e"))
    async with cluster(tmp_path, script) as found:
        assert await pods(found) == ["a", "b", "c", "d", "e"]
    assert [request.query.get("continue") for request in script.asked] == [None, "x", "y"]


async def test_a_list_whose_pages_were_forgotten_is_asked_for_whole(tmp_path: Path) -> None:
    script = Script(page("ab", more="x"), failure(410), page("abc"))
    async with cluster(tmp_path, script) as found:
        assert await pods(found) == ["a", "b", "c"]
    assert [request.query.get("limit") for request in script.asked] == ["500", "500", None]


async def test_a_busy_server_is_asked_again_when_it_says(tmp_path: Path) -> None:
    async with cluster(tmp_path, Script(failure(429, wait_s="0"), page("a"))) as found:
        assert await pods(found) == ["a"]


@pytest.mark.parametrize(
    ("answer", "wait_s"),
    [
        pytest.param(failure(429, wait_s="60"), 60.0, id="busy for long"),
        pytest.param(failure(429, wait_s="0"), 0.0, id="busy each time"),
        pytest.param(failure(503, wait_s="5"), 5.0, id="not there yet"),
        pytest.param(failure(503), None, id="not there, no word of when"),
        pytest.param(lambda _: web.Response(status=502, text="proxy"), None, id="a proxy's own answer"),
    ],
)
async def test_a_server_in_trouble_is_unavailable_with_its_word_of_when(
    tmp_path: Path, answer: Answer, wait_s: float | None
) -> None:
    async with cluster(tmp_path, Script(answer)) as found:
        with pytest.raises(StoreUnavailable) as away:
            await pods(found)
    assert (away.value.retry_after_s or None) == (wait_s or None)


async def test_a_token_that_was_renewed_is_tried_once_more(tmp_path: Path) -> None:
    script = Script(failure(401), page("a"))
    async with cluster(tmp_path, script, Changing()) as found:
        assert await pods(found) == ["a"]
    assert [request.headers["authorization"] for request in script.asked] == ["Bearer 0", "Bearer 1"]


async def test_a_token_that_stays_refused_is_no_retry_for_ever(tmp_path: Path) -> None:
    script = Script(failure(401))
    async with cluster(tmp_path, script, Changing()) as found:
        with pytest.raises(Forbidden, match="does not accept these credentials"):
            await pods(found)
    assert len(script.asked) == 2


def tiers(*specs: Any) -> Answer:
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


def events(*made: tuple[str, dict[str, Any]]) -> Answer:
    text = "".join(json.dumps({"type": kind, "object": body}) + "\n" for kind, body in made)
    return lambda _: web.Response(text=text, content_type="application/json")


def tier(number: int, version: str, spec: Any) -> dict[str, Any]:
    metadata = {"name": f"t-{number}", "namespace": "default", "resourceVersion": version}
    return {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "QoSTier", "metadata": metadata, "spec": spec}


async def test_a_field_that_a_newer_writer_added_is_passed_over(tmp_path: Path) -> None:
    async with cluster(tmp_path, Script(tiers({"priority": 1, "new": True}))) as found:
        listing = await found.store.list(QoSTier, namespace="default")
    assert [(obj.metadata.name, obj.spec.priority) for obj in listing.items] == [("t-0", 1)]


async def test_an_object_that_cannot_be_read_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    async with cluster(tmp_path, Script(tiers({"priority": "high"}, {"priority": 2}))) as found:
        listing = await found.store.list(QoSTier, namespace="default")
    assert [obj.metadata.name for obj in listing.items] == ["t-1"]
    assert listing.unreadable == (("default", "t-0"),)


async def test_a_change_that_cannot_be_read_does_not_end_the_watch(tmp_path: Path) -> None:
    made = events(
        ("MODIFIED", tier(0, "8", {"priority": "high"})), ("MODIFIED", tier(1, "9", {"priority": 3}))
    )
    async with cluster(tmp_path, Script(made)) as found:
        seen = [event async for event in found.store.watch(QoSTier, namespace="default", since="7")]
    assert [(event.type, event.unreadable, event.resource_version) for event in seen] == [
        (EventType.MODIFIED, ("default", "t-0"), "8"),
        (EventType.MODIFIED, None, "9"),
    ]


async def test_a_mirror_keeps_what_it_last_read_until_the_object_is_gone(tmp_path: Path) -> None:
    slept: list[dict[str, int]] = []

    class Enough(Exception):
        """The script is played."""

    async def sleep(_: float) -> None:
        slept.append({name: obj.spec.priority for name, obj in informer.objects.items()})
        if len(slept) == 3:
            raise Enough

    script = Script(
        tiers({"priority": 1}, {"priority": 2}),
        events(("MODIFIED", tier(0, "8", {"priority": "high"}))),
        events(("ERROR", {"code": 410, "message": "too old"})),
        tiers({"priority": "high"}, {"priority": 2}),
        events(("DELETED", tier(0, "9", {"priority": "high"}))),
    )
    async with cluster(tmp_path, script) as found:
        informer = Informer(found.store, QoSTier, namespace="default", sleep=sleep)
        with pytest.raises(Enough):
            await informer.run()
    assert slept == [{"t-0": 1, "t-1": 2}, {"t-0": 1, "t-1": 2}, {"t-1": 2}]
    assert informer.unreadable == frozenset()


async def test_a_cluster_without_our_kinds_is_told_what_is_missing(tmp_path: Path) -> None:
    nothing: Answer = lambda _: web.Response(status=404, text="404 page not found")  # noqa: E731
    async with cluster(tmp_path, Script(nothing)) as found:
        with pytest.raises(Exception, match=r"/pdservices does not exist: is its CRD installed\?"):
            await found.store.list(PDService, namespace="default")


@pytest.mark.looptime
async def test_a_watch_that_is_taken_and_never_begun_is_given_up(tmp_path: Path) -> None:
    """As an API server does that is just starting; the silence of a watch that has begun may last longer."""

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
