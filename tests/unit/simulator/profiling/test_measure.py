"""The engine server, measured over HTTP on a virtual clock, gives the profile back that it runs on."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fulcrum_cluster.process import bind_socket
from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_simulator.profiling import (
    EngineClient,
    EngineLimits,
    EngineUnusable,
    MeasurementPlan,
    Measurer,
    fit_link,
    fit_profile,
    plan_measurement,
)
from fulcrum_simulator.profiling.engine_client import TokenTimes
from fulcrum_simulator.profiling.samples import DecodeMeasurement
from fulcrum_simulator.server.app import EngineApp
from fulcrum_simulator.server.options import Options
from fulcrum_simulator.server.service import EngineService
from fulcrum_simulator.server.side_channel_server import SideChannelServer, start_side_channel_server
from tests.waiting import advance

pytestmark = pytest.mark.looptime(start=0.0)

PROFILE = load_profile("laptop").model_copy(
    update={"mixed_factor": 1.3, "handshake_s": 0.05, "fetch_start_s": 0.03}
)


@asynccontextmanager
async def engine_server(profile: EngineProfile) -> AsyncIterator[str]:
    """Serve an engine on the loop's clock; yields its address."""
    loop = asyncio.get_running_loop()
    service = EngineService(
        Options(
            name="a",
            model="m",
            profile=profile,
            host="127.0.0.1",
            port=0,
            side_channel_port=0,
            lease_s=1e6,
            shutdown_timeout_s=0.0,
            max_model_tokens=8192,
            seed=0,
        ),
        now_s=loop.time,
    )
    side_channel = bind_socket("127.0.0.1", 0, option="")
    service.side_channel_port = side_channel.getsockname()[1]
    listener = await start_side_channel_server(
        SideChannelServer(service.runner, model="m", wait_while_hung=service.wait_while_hung), side_channel
    )
    try:
        async with http_server(EngineApp(service).build()) as url:
            yield url
    finally:
        listener.close()
        await listener.wait_closed()
        await service.puller.close()


@asynccontextmanager
async def http_server(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    http = bind_socket("127.0.0.1", 0, option="")
    await web.SockSite(runner, http).start()
    try:
        yield f"http://127.0.0.1:{http.getsockname()[1]}"
    finally:
        await runner.cleanup()


async def test_the_coefficients_of_a_known_engine_are_recovered() -> None:
    lines: list[str] = []
    async with AsyncExitStack() as stack:
        prefill_url = await stack.enter_async_context(engine_server(PROFILE))
        decode_url = await stack.enter_async_context(engine_server(PROFILE))
        client = await stack.enter_async_context(EngineClient.open(prefill_url, seed=1))
        decode = await stack.enter_async_context(EngineClient.open(decode_url, seed=1))
        limits = await client.read_limits()
        plan = plan_measurement(
            max_model_tokens=limits.max_model_tokens,
            kv_tokens=limits.kv_tokens,
            block_size=limits.block_size,
            token_budget=PROFILE.token_budget,
            max_batch=8,
        )
        measurer = Measurer(client, limits, token_budget=PROFILE.token_budget, repeats=1, report=lines.append)
        await measurer.warm_up(plan)
        curves = await measurer.measure(plan, decode)
        fitted = fit_profile(
            prefill=curves.prefill,
            decode=curves.decode,
            mixed=curves.mixed,
            token_budget=PROFILE.token_budget,
        )
        assert curves.first_transfer is not None
        link = fit_link(curves.first_transfer, curves.transfers, curves.fetches, fitted)
    steps = fitted.steps
    assert [steps.t0, steps.b, steps.c, steps.d1, steps.d2, steps.mixed_factor] == pytest.approx(
        [PROFILE.t0, PROFILE.b, PROFILE.c, PROFILE.d1, PROFILE.d2, PROFILE.mixed_factor], rel=0.1
    )
    assert [link.s_per_token, link.setup_s, link.handshake_s, link.fetch_start_s] == pytest.approx(
        [
            PROFILE.kv_bytes_per_token / PROFILE.link_bytes_per_s,
            PROFILE.link_setup_s,
            PROFILE.handshake_s,
            PROFILE.fetch_start_s,
        ],
        rel=0.1,
    )
    assert max(curve.mape for curve in (*fitted.curves, link.curve)) < 0.02
    assert len(lines) == 62


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def respond_models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})


async def respond_metrics(_: web.Request) -> web.Response:
    return web.Response(text='vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0\n')


def text_response(text: str, status: int = 200) -> Handler:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    return respond


def stream_of(*events: str) -> Handler:
    return text_response("".join(f"data: {event}\n\n" for event in events))


async def measure_two_prompts(client: EngineClient) -> None:
    limits = await client.read_limits()
    measurer = Measurer(client, limits, token_budget=512, repeats=1, report=lambda _: None)
    await measurer.measure(MeasurementPlan((64, 128), (), 1, (), ()))


async def measure_bad_engine(completions: Handler, **routes: Handler) -> str:
    """Measure one prompt of an engine with these handlers; returns the error after the address."""
    app = web.Application()
    app.router.add_get("/v1/models", routes.get("models", respond_models))
    app.router.add_get("/metrics", routes.get("metrics", respond_metrics))
    app.router.add_post("/v1/completions", completions)
    async with http_server(app) as url, EngineClient.open(url, seed=1) as client:
        with pytest.raises(EngineUnusable) as caught:
            await measure_two_prompts(client)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{url}: ")
    return text.removeprefix(f"{url}: ")


TOKEN = '{"choices": [{"text": "a"}]}'


@pytest.mark.parametrize(
    ("completions", "routes", "message"),
    [
        pytest.param(
            text_response(""),
            {"models": text_response("nothing", 404)},
            "/v1/models has status 404",
            id="no models",
        ),
        pytest.param(
            text_response(""),
            {"metrics": text_response("up 1\n")},
            "is not vLLM: no max_model_len or cache_config_info",
            id="other metrics",
        ),
        pytest.param(
            text_response(""),
            {"models": text_response("[]")},
            "is not vLLM: no max_model_len or cache_config_info",
            id="models of another shape",
        ),
        pytest.param(
            text_response('{"error": {"message": "too\\nbusy"}}', 503),
            {},
            "status 503: too busy",
            id="refusal",
        ),
        pytest.param(
            text_response("x" * 500, 500), {}, f"status 500: {'x' * 200}", id="an error that is no JSON"
        ),
        pytest.param(stream_of("no JSON"), {}, "sends an event that is not a completion", id="broken events"),
        *(
            pytest.param(stream_of(event), {}, "sends an event that is not a completion", id=event[:20])
            for event in ("[]", "1", '{"choices": 1}', '{"choices": [1]}', '{"usage": 1}', "[" * 100_000)
        ),
        pytest.param(
            stream_of('{"error": {"message": "engine died"}}'),
            {},
            "ended the stream: engine died",
            id="an error within the stream",
        ),
        pytest.param(
            stream_of(TOKEN, "[DONE]"),
            {},
            "counted None and None tokens instead of 64 and 1",
            id="no usage",
        ),
        pytest.param(
            stream_of(TOKEN, TOKEN, TOKEN), {}, "sends more than the 1 tokens asked for", id="too many tokens"
        ),
        pytest.param(
            stream_of('{"choices": [], "usage": {"prompt_tokens": 64, "completion_tokens": 1}}', "[DONE]"),
            {},
            "sent no token",
            id="no token",
        ),
        *(
            pytest.param(
                text_response(""),
                {"models": text_response('{"data": [{"id": "m", "max_model_len": ' + tokens + "}]}")},
                message,
                id=f"max_model_len {tokens[:6]}",
            )
            for tokens, message in (
                ("1e999", "is not vLLM: no max_model_len or cache_config_info"),
                ("0", "max_model_len (0 tokens) is not from 1 to 10,000,000"),
                ("100000000", "max_model_len (100000000 tokens) is not from 1 to 10,000,000"),
                ("9" * 4000, f"max_model_len ({'9' * 20} tokens) is not from 1 to 10,000,000"),
            )
        ),
        pytest.param(
            text_response(""),
            {
                "metrics": text_response(
                    'vllm:cache_config_info{block_size="16",num_gpu_blocks="99999999"} 1\n'
                )
            },
            "KV cache (1599999984 tokens) is not from 1 to 1,073,741,824",
            id="a KV cache of 1.6 billion tokens",
        ),
        pytest.param(
            text_response(""),
            {"metrics": text_response("vllm:cache_config_info{\n" * 40_000)},
            "is not vLLM: no max_model_len or cache_config_info",
            id="a page on which a slow search takes minutes",
        ),
        pytest.param(
            text_response(""),
            {"metrics": text_response("#" * (2 << 20))},
            "sends more than 1,048,576 bytes",
            id="a long page",
        ),
        pytest.param(
            text_response("[" * 100_000, 500),
            {},
            f"status 500: {'[' * 200}",
            id="an error that is nested deep",
        ),
        pytest.param(
            stream_of(
                '{"choices": [], "usage": {"prompt_tokens": "%s", "completion_tokens": 1}}' % ("9" * 999)
            ),
            {},
            f"counted {'9' * 392}",
            id="a long count",
        ),
        pytest.param(
            text_response("data: " + "x" * (2 << 20)), {}, "sends an event that does not end", id="no end"
        ),
    ],
)
async def test_an_engine_that_cannot_be_measured_is_one_line(
    completions: Handler, routes: dict[str, Handler], message: str
) -> None:
    assert await measure_bad_engine(completions, **routes) == message


async def test_no_request_uses_a_connection_that_the_engine_may_be_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM closes a connection that was idle for 5 seconds; what arrives meanwhile gets no response."""
    ports = []

    async def note_port(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return await respond_models(request)

    app, begin_s = web.Application(), time.monotonic()
    app.router.add_get("/v1/models", note_port)
    app.router.add_get("/metrics", respond_metrics)
    async with http_server(app) as url, EngineClient.open(url, seed=1) as client:
        for idle_s in (0.0, 1.0, 5.0):
            monkeypatch.setattr("aiohttp.connector.monotonic", lambda idle_s=idle_s: begin_s + idle_s)
            await client.read_limits()
    assert ports[0] == ports[1] != ports[2]


async def test_an_engine_that_is_not_there_is_one_line() -> None:
    async with EngineClient.open("http://127.0.0.1:9", seed=1) as client:
        with pytest.raises(EngineUnusable, match=r"^http://127.0.0.1:9: cannot be reached: ") as caught:
            await client.read_limits()
    assert "\n" not in str(caught.value)


async def test_an_engine_that_ends_within_a_response_is_one_line() -> None:
    async def end(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(f"data: {TOKEN}\n\n".encode())
        assert request.transport is not None
        request.transport.abort()
        return response

    assert (await measure_bad_engine(end)).startswith("broke off: ")


async def test_an_engine_that_does_not_respond_is_given_up() -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    assert await measure_bad_engine(hang) == "sends no token for 120 s"


def drip(data: bytes) -> Handler:
    """Send the same bytes every ten seconds without end."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(data)
            await advance(10.0)

    return respond


async def test_an_engine_that_sends_events_without_tokens_is_given_up() -> None:
    events = drip(b': still here\n\ndata: {"choices": []}\n\n')
    assert await measure_bad_engine(events) == "sends no token for 120 s"


async def test_a_page_that_never_ends_is_given_up() -> None:
    found = await measure_bad_engine(text_response(""), metrics=drip(b"#"))
    assert found == "does not respond for 120 s"


TRANSFERS = MeasurementPlan((), (), 1, (), (64, 128))


async def test_an_engine_without_a_kv_connector_is_one_line() -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", text_response("{}"))
    async with http_server(app) as url, EngineClient.open(url, seed=1) as client:
        limits = EngineLimits("m", 4096, 65536, 16)
        measurer = Measurer(client, limits, token_budget=512, repeats=1, report=lambda _: None)
        with pytest.raises(EngineUnusable, match="returned no kv_transfer_params: has it a KV connector"):
            await measurer.measure(TRANSFERS, client)


async def test_a_prompt_that_is_computed_instead_of_transferred_is_noticed() -> None:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(engine_server(PROFILE)) for _ in range(2)]
        prefill, decode = [await stack.enter_async_context(EngineClient.open(url, seed=1)) for url in urls]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.post(
            f"{decode.url}/simulator/fault", json={"kind": "fail_transfers", "count": 9}
        ) as response:
            assert response.status == 200
        limits = await prefill.read_limits()
        measurer = Measurer(prefill, limits, token_budget=512, repeats=1, report=lambda _: None)
        with pytest.raises(EngineUnusable, match="computed the prompt itself instead of fetching its KV"):
            await measurer.measure(TRANSFERS, decode)


async def measure_small_engine(max_model_tokens: int) -> list[DecodeMeasurement]:
    """Measure 16 requests on an engine whose steps are 128 times smaller than the plan believes."""
    small = PROFILE.model_copy(update={"token_budget": 64, "max_seqs": 16})
    async with engine_server(small) as url, EngineClient.open(url, seed=1) as client:
        limits = EngineLimits("m", max_model_tokens, PROFILE.kv_capacity_tokens, PROFILE.block_size)
        measurer = Measurer(client, limits, token_budget=8192, repeats=1, report=lambda _: None)
        return (await measurer.measure(MeasurementPlan((), ((16, 512),), 1, (), ()))).decode


async def test_a_token_budget_above_the_engines_is_made_up_for_by_longer_runs() -> None:
    (sample,) = await measure_small_engine(8192)
    expected_s = PROFILE.step_model.step_from_sums_s(
        prefill_tokens=0, attention=0, decodes=16, context_tokens=round(sample.context_tokens)
    )
    assert sample.seconds == pytest.approx(expected_s, rel=0.02)


async def test_a_mixed_step_is_right_though_decodes_become_slower_meanwhile() -> None:
    """Here each step that decodes takes longer than the one before, as on a machine that slows down."""
    profile = PROFILE.model_copy(update={"d2": 50 * PROFILE.d2})
    async with engine_server(profile) as url, EngineClient.open(url, seed=1) as client:
        limits = await client.read_limits()
        measurer = Measurer(client, limits, token_budget=512, repeats=1, report=lambda _: None)
        plan = MeasurementPlan((), ((4, 64),), mixed_batch=4, mixed=(64, 256), transfer=())
        measured = (await measurer.measure(plan)).mixed
    steps = profile.step_model
    for sample in measured:
        expected_s = steps.step_from_sums_s(
            prefill_tokens=sample.tokens,
            attention=sample.tokens**2,
            decodes=4,
            context_tokens=round(sample.context_tokens),
        )
        assert sample.seconds == pytest.approx(expected_s, rel=1e-3)


async def test_an_engine_that_mixes_no_prompts_with_decodes_has_no_such_steps() -> None:
    """Looking for them takes ever longer runs, which must not make those of the other curves longer."""
    full = PROFILE.model_copy(update={"token_budget": 4, "max_seqs": 4})  # four decodes leave no room
    async with engine_server(full) as url, EngineClient.open(url, seed=1) as client:
        limits = EngineLimits("m", 1000, PROFILE.kv_capacity_tokens, PROFILE.block_size)
        measurer = Measurer(client, limits, token_budget=8, repeats=3, report=lambda _: None)
        plan = MeasurementPlan((), ((4, 16),), mixed_batch=4, mixed=(64,), transfer=())
        measured = await measurer.measure(plan)
    assert measured.mixed == []
    assert measured.decode[0].context_tokens < 4 * (16 + 64)


async def test_a_second_engine_that_runs_fewer_requests_together_is_left_out() -> None:
    """Its batch is never complete: some of the requests begin when others have ended."""
    lines: list[str] = []
    small = PROFILE.model_copy(update={"max_seqs": 4})
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(engine_server(profile)) for profile in (PROFILE, small)]
        prefill, decode = [await stack.enter_async_context(EngineClient.open(url, seed=1)) for url in urls]
        limits = EngineLimits("m", 600, PROFILE.kv_capacity_tokens, PROFILE.block_size)
        measurer = Measurer(prefill, limits, token_budget=512, repeats=2, report=lines.append)
        plan = MeasurementPlan((), ((8, 64),), mixed_batch=8, mixed=(), transfer=(32,))
        measured = await measurer.measure(plan, decode)
    assert (measured.fetches, len(measured.transfers)) == ([], 1)
    assert lines.count("left out: the batch ended too soon after KV transfers of 32 tokens") == 1


async def test_all_curves_are_measured_in_turn() -> None:
    lines: list[str] = []
    async with engine_server(PROFILE) as url, EngineClient.open(url, seed=1) as client:
        limits = await client.read_limits()
        measurer = Measurer(client, limits, token_budget=512, repeats=2, report=lines.append)
        await measurer.measure(MeasurementPlan((64, 128), ((2, 64),), 1, (), ()))
    assert lines == 2 * [
        "prefill of 64 tokens",
        "prefill of 128 tokens",
        "decode of 2 requests of 64 tokens",
    ]


async def test_an_engine_without_room_for_longer_runs_is_one_line() -> None:
    with pytest.raises(EngineUnusable, match="steps undisturbed: is it idle, is --token-budget right"):
        await measure_small_engine(700)


async def test_a_slow_moment_of_the_engine_spoils_no_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three prompts are slow: were these all repeats of one point, it would be wrong."""
    sent: list[int] = []
    plan = MeasurementPlan(prefill=(128, 256, 512), decode=(), mixed_batch=1, mixed=(), transfer=())

    async def stream(_client: EngineClient, body: dict[str, Any], times: TokenTimes) -> None:
        sent.append(len(body["prompt"]))
        times.sent_s, slowness = 0.0, 100.0 if len(sent) <= len(plan.prefill) else 1.0
        times.tokens_s.append(slowness * sent[-1])

    monkeypatch.setattr(EngineClient, "stream", stream)
    async with EngineClient.open("http://127.0.0.1:9", seed=1) as client:
        limits = EngineLimits("m", max_model_tokens=8192, kv_tokens=65536, block_size=16)
        measurer = Measurer(client, limits, token_budget=512, repeats=3, report=lambda _line: None)
        measured = (await measurer.measure(plan)).prefill
    assert [(one.tokens, one.seconds) for one in measured] == [(128, 128.0), (256, 256.0), (512, 512.0)]


async def test_several_tokens_in_one_event_count_as_several() -> None:
    events = ('{"choices": [{"token_ids": [1, 2]}]}', '{"choices": [{"text": "", "token_ids": []}]}')
    usage = '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}'
    app = web.Application()
    app.router.add_post("/v1/completions", stream_of(*events, TOKEN, usage, "[DONE]"))
    times = TokenTimes()
    async with http_server(app) as url, EngineClient.open(url, seed=1) as client:
        await client.stream({"prompt": client.make_prompt(3), "max_tokens": 3}, times)
    assert len(times.tokens_s) == 3


async def test_no_two_prompts_begin_alike() -> None:
    async with EngineClient.open("http://127.0.0.1:9", seed=1) as client:
        prompts = [client.make_prompt(64) for _ in range(500)]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 500
    assert {len(prompt) for prompt in prompts} == {64}
