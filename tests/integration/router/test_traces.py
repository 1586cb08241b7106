"""The spans of a request arrive at an OTLP receiver, and the engines continue its trace."""

import asyncio
import random
import socket
from contextlib import closing
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from fulcrum_cluster.tracing import RootSpans, TraceSettings, open_otlp_sender
from fulcrum_core.spans import parse_traceparent
from fulcrum_router.control.metrics import build_registry
from fulcrum_router.control.metrics_port import make_metrics_app
from fulcrum_router.control.requests_page import RequestsPage
from fulcrum_router.tracing.request_trace import RequestTracer
from tests.integration.router.fake_engines import PROMPT, FakeEngine, respond_with_status, run_router
from tests.integration.router.otlp_receiver import OtlpReceiver, Received, run_otlp_receiver
from tests.waiting import wait_until

SECRET = "the launch code is 0000"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


async def wait_until_listening(receiver: OtlpReceiver) -> None:
    port = int(receiver.url.rpartition(":")[2])

    def accepts() -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await wait_until(accepts, "the receiver listens")


async def test_the_spans_of_a_request_arrive_and_hold_nothing_of_its_prompt(
    client: aiohttp.ClientSession,
) -> None:
    engines = [FakeEngine("p1"), FakeEngine("d1")]
    with run_otlp_receiver() as receiver:
        await wait_until_listening(receiver)
        settings = TraceSettings(receiver.url, 0.0)
        async with (
            run_router(*engines) as world,
            open_otlp_sender("fulcrum-router", settings, instance="r") as sender,
        ):
            assert sender is not None
            world.router.tracer = RequestTracer(sender, ratio=0.0, rng=random.Random(1))
            body = {**PROMPT, "prompt": SECRET, "stream": True}
            for headers in ({"traceparent": PARENT, "tracestate": "a=b"}, {}):
                async with client.post(world.url(), json=body, headers=headers) as response:
                    await response.read()
            await wait_until(world.ledgers_are_empty, "the requests have ended")
            RootSpans(sender, ratio=0.0, rng=random.Random(2)).send(
                "fulcrum.flip", start_s=1.0, end_s=2.5, attributes={"fulcrum.to": "decode"}
            )
        await wait_until(lambda: len(receiver.spans) >= 6, "the spans have arrived")
    check_spans(receiver, world["p1"], world["d1"])


def check_spans(receiver: OtlpReceiver, prefill: FakeEngine, decode: FakeEngine) -> None:
    by_name: dict[str, Received] = {span.name: span for span in receiver.spans}
    root, flip = by_name["fulcrum.request"], by_name["fulcrum.flip"]
    assert sorted(span.name for span in receiver.spans) == [
        "fulcrum.decode",
        "fulcrum.flip",
        "fulcrum.kv_transfer",
        "fulcrum.prefill",
        "fulcrum.request",
        "fulcrum.waiting",
    ], "a request without a sampled trace is not traced"
    assert (root.program, root.trace_id, root.parent_id) == ("fulcrum-router", TRACE, "00f067aa0ba902b7")
    assert (flip.seconds, flip.attributes) == (1.5, {"fulcrum.to": "decode"})
    children = [by_name[f"fulcrum.{name}"] for name in ("waiting", "prefill", "decode")]
    assert {(span.trace_id, span.parent_id) for span in children} == {(TRACE, root.span_id)}
    assert sum(span.seconds for span in children) == pytest.approx(root.seconds, abs=0.02)
    assert (root.attributes["fulcrum.outcome"], root.attributes["fulcrum.tier"]) == ("ok", "default")
    for engine, span in ((prefill, children[1]), (decode, children[2])):
        headers = [request.headers for request in engine.requests]
        sent = parse_traceparent(headers[0]["traceparent"].encode())
        assert sent is not None
        assert (f"{sent.trace_id:032x}", f"{sent.span_id:016x}") == (TRACE, span.span_id)
        assert (headers[0]["tracestate"], "traceparent" in headers[1]) == ("a=b", False)
    assert SECRET not in repr(receiver.spans)


async def test_a_scraper_of_openmetrics_gets_the_trace_of_a_request(client: aiohttp.ClientSession) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        world.router.tracer = RequestTracer(Discard(), ratio=0.0, rng=random.Random(1))
        body = {**PROMPT, "stream": True}
        async with client.post(world.url(), json=body, headers={"traceparent": PARENT}) as response:
            await response.read()
        await wait_until(world.ledgers_are_empty, "the request has ended")
        server = TestServer(make_metrics_app(build_registry(world.router), RequestsPage(world.router)))
        async with server:
            pages = {}
            for kind in ("application/openmetrics-text", "text/plain"):
                async with client.get(server.make_url("/metrics"), headers={"accept": kind}) as response:
                    assert (response.status, response.content_type) == (200, kind)
                    pages[kind] = await response.text()
    lines = [line for line in pages["application/openmetrics-text"].splitlines() if TRACE in line]
    assert [line.partition("{")[0] for line in lines] == ["fulcrum_router_ttft_seconds_bucket"]
    assert TRACE not in pages["text/plain"]


class Discard:
    def send(self, spans: Any) -> None:
        """Drop the spans."""


async def test_a_failed_request_and_its_failed_leg_are_marked(client: aiohttp.ClientSession) -> None:
    sent: list[Any] = []

    class Sink:
        def send(self, spans: Any) -> None:
            sent.extend(spans)

    broken = respond_with_status(500)
    engines = [FakeEngine("p1", decode=broken), FakeEngine("d1", decode=broken)]
    async with run_router(*engines) as world:
        world.router.tracer = RequestTracer(Sink(), ratio=1.0, rng=random.Random(1))
        async with client.post(world.url(), json=PROMPT) as response:
            assert response.status == 502
        await wait_until(lambda: bool(sent), "the trace has ended")
    errors = {span.name: span.error for span in sent}
    assert (errors["fulcrum.request"], errors["fulcrum.prefill"], bool(errors["fulcrum.decode"])) == (
        "failed",
        "",
        True,
    )


async def test_a_receiver_that_is_away_costs_no_request(client: aiohttp.ClientSession) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with (
            run_router(FakeEngine("p1"), FakeEngine("d1")) as world,
            open_otlp_sender("fulcrum-router", TraceSettings(endpoint, 1.0), instance="r") as sender,
        ):
            assert sender is not None
            world.router.tracer = RequestTracer(sender, ratio=1.0, rng=random.Random(1))
            async with asyncio.timeout(5), client.post(world.url(), json=PROMPT) as response:
                assert response.status == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
async def test_a_passed_through_request_has_a_leg_that_its_engine_continues(
    client: aiohttp.ClientSession, path: str
) -> None:
    sent: list[Any] = []

    class Sink:
        def send(self, spans: Any) -> None:
            sent.extend(spans)

    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        world.router.tracer = RequestTracer(Sink(), ratio=0.0, rng=random.Random(1))
        body = {"model": "m", "input": SECRET}
        async with client.post(world.url(path), json=body, headers={"traceparent": PARENT}) as response:
            await response.read()
        await wait_until(lambda: bool(sent), "the trace has ended")
        (request,) = [request for engine in world.engines.values() for request in engine.requests]
    by_name = {span.name: span for span in sent}
    assert sorted(by_name) == ["fulcrum.pass_through", "fulcrum.request", "fulcrum.waiting"]
    root, leg = by_name["fulcrum.request"], by_name["fulcrum.pass_through"]
    parent = parse_traceparent(request.headers["traceparent"].encode())
    assert parent is not None
    assert (root.attributes["fulcrum.path"], leg.parent_id, parent.span_id) == (
        path, root.span_id, leg.span_id,
    )  # fmt: skip
    assert SECRET not in repr(sent)
