"""The load generator over a real loopback connection to a scripted service."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fulcrum_core.values import Slo
from fulcrum_simulator.client import LoadGenerator, LoadTarget
from fulcrum_simulator.text import count_tokens, output_token, prompt_digest
from fulcrum_simulator.workload import WorkloadRequest

Responder = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def run_service(respond: Responder) -> AsyncIterator[int]:
    """Run a service that reads requests on kept-alive connections and responds with `respond`; yields its
    port.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await respond(json.loads(await reader.readexactly(length)), writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await server.wait_closed()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def events_of(body: dict[str, object]) -> list[bytes]:
    prompt = str(body["prompt"]).encode()
    digest, tokens = prompt_digest(prompt), int(str(body["max_tokens"]))
    events: list[object] = [{"choices": [{"text": output_token(digest, index)}]} for index in range(tokens)]
    events.append(
        {"choices": [], "usage": {"prompt_tokens": count_tokens(prompt), "completion_tokens": tokens}}
    )
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def respond_correctly(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    for event in events_of(body):
        writer.write(chunk(event))
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def never_respond(_body: dict[str, object], _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def respond_half(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(events_of(body)[0]))
    await writer.drain()
    writer.close()


def make_generator(port: int, *, max_connections: int = 64) -> LoadGenerator:
    target = LoadTarget(host="127.0.0.1", port=port, model="m", max_connections=max_connections)
    return LoadGenerator(target, slo=Slo(ttft_s=5.0, tpot_s=1.0), seed=3)


def simultaneous_requests(count: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(0.0, 20, 4) for _ in range(count)]


async def test_correct_responses_are_ok_and_connections_are_reused() -> None:
    async with run_service(respond_correctly) as port:
        load = make_generator(port)
        for _ in range(3):
            await load.send(simultaneous_requests(5))
        await load.finish(timeout_s=20.0)
        report = load.results.report()
    assert (report.offered, report.ok, report.in_flight, report.output_tokens) == (15, 15, 0, 60)
    assert (report.attainment, report.reasons, report.connection_waits) == (1.0, {}, 0)


async def test_requests_beyond_the_connection_limit_wait_and_are_counted() -> None:
    async with run_service(respond_correctly) as port:
        load = make_generator(port, max_connections=2)
        await load.send(simultaneous_requests(6))
        await load.finish(timeout_s=20.0)
        report = load.results.report()
    assert (report.offered, report.ok, report.connection_waits) == (6, 6, 4)


async def test_requests_unfinished_at_the_end_count_as_failed() -> None:
    async with run_service(never_respond) as port:
        load = make_generator(port, max_connections=2)
        await load.send(simultaneous_requests(3))
        await load.finish(timeout_s=0.05)
        report = load.results.report()
    assert (report.offered, report.failed, report.in_flight) == (3, 3, 0)
    assert report.reasons == {"unfinished when the run ended": 3}


async def test_a_stream_cut_without_an_error_event_is_broken_silently() -> None:
    async with run_service(respond_half) as port:
        load = make_generator(port, max_connections=1)
        await load.send(simultaneous_requests(3))
        await load.finish(timeout_s=20.0)
        report = load.results.report()
    assert (report.broken, report.broken_silently, report.attainment) == (3, 3, 0.0)


async def test_an_unreachable_service_fails_every_request() -> None:
    async with run_service(respond_correctly) as port:
        pass
    load = make_generator(port, max_connections=1)
    await load.send(simultaneous_requests(3))
    await load.finish(timeout_s=20.0)
    report = load.results.report()
    assert (report.failed, report.reasons) == (3, {"cannot connect: ConnectionRefusedError": 3})


async def test_all_requests_are_sent_and_none_early_while_the_service_hangs() -> None:
    async with run_service(never_respond) as port:
        load = make_generator(port)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        await load.send([WorkloadRequest(n * 0.02, 20, 4) for n in range(5)], start_s=start_s)
        took_s = loop.time() - start_s
        await load.close()
    assert took_s >= 0.08
    assert load.results.offered == 5
