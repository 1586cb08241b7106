"""`fulcrum play`: runs a service under load, with a live view or without, and reports the figures.

It starts the local run, the page and the recording, and ends them in order; what happens meanwhile is in the
package `play`.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvloop

from fulcrum_cli.local.run import LocalRun, LocalRunOptions, run_local
from fulcrum_cli.output_files import write_text_file
from fulcrum_cli.play.frame import Frame
from fulcrum_cli.play.observer import Observer
from fulcrum_cli.play.options import PlayOptions
from fulcrum_cli.play.page_controls import PageControls
from fulcrum_cli.play.recorder import RecordedFlip
from fulcrum_cli.play.report import RunFigures
from fulcrum_cli.play.screen import draw_frames, is_interactive, read_keyboard, render_svg
from fulcrum_cli.play.session import ServiceHandle, Session
from fulcrum_cli.terminal.interrupts import on_interrupt
from fulcrum_cli.terminal.logs import log_to_file, log_warnings_to_stderr
from fulcrum_cli.terminal.printable import print_lines
from fulcrum_cli.web.broadcast import Broadcast
from fulcrum_cli.web.feed import Feed
from fulcrum_cli.web.recording import record
from fulcrum_cli.web.server import serve_page
from fulcrum_cli.web.sources import open_local_source
from fulcrum_cluster.client import open_store
from fulcrum_cluster.router_client import HttpRouterClient, open_http_client
from fulcrum_core.errors import FulcrumError, InvalidInput
from fulcrum_core.ports import Store
from fulcrum_core.profiles import load_profile
from fulcrum_simulator.client import LoadGenerator, LoadTarget, split_address

MAX_CONNECTIONS = 2048
CHAT_SHARE = 0.2
"""Share of chat requests; the others are completions. All are streamed: TTFT needs a stream."""

EXIT_INTERRUPTED = 130


def run(options: PlayOptions) -> int:
    """Run the load, print and write the figures, and return the exit code."""
    headless = options.headless or options.web or not is_interactive()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_play_until_ended(options, headless=headless))
    if result is None:
        return EXIT_INTERRUPTED
    figures, frame = result
    try:
        write_results(figures, frame, json_file=options.json, snapshot=options.snapshot)
    finally:
        print_lines(figures.as_text().split("\n"))
    if figures.too_slow:
        print("machine too slow: engine steps were late, see above", file=sys.stderr)
    if figures.flips_failure:
        print(f"error: --flips ({options.flips}) {figures.flips_failure}", file=sys.stderr)
    return 1 if figures.flips_failure else 0


def write_results(
    figures: RunFigures, frame: Frame | None, *, json_file: Path | None, snapshot: Path | None
) -> None:
    """Write the result files; try both, then report failures.

    Raises:
        FulcrumError: naming each file that could not be written.
    """
    failed: list[InvalidInput] = []
    text = json.dumps(figures.as_json(), indent=2, ensure_ascii=False)
    try:
        if json_file is not None:
            write_text_file("--json", json_file, text + "\n")
    except InvalidInput as error:
        failed.append(error)
    try:
        if snapshot is not None and frame is not None:
            write_text_file("--snapshot", snapshot, render_svg(frame))
    except InvalidInput as error:
        failed.append(error)
    if failed:
        raise failed[0] if len(failed) == 1 else FulcrumError("; ".join(map(str, failed)))


async def _play_until_ended(
    options: PlayOptions, *, headless: bool
) -> tuple[RunFigures, Frame | None] | None:
    """Return the run's figures and its last frame; None if interrupted before the load began."""
    main_task = asyncio.current_task()
    assert main_task is not None
    sessions: list[Session] = []

    def handle_interrupt() -> None:
        if sessions and sessions[0].started:
            sessions[0].quit()
        else:
            main_task.cancel()

    log_warnings_to_stderr() if headless else log_to_file(None)
    try:
        with on_interrupt(handle_interrupt):
            async with _open_session(options, headless=headless) as (session, service):
                sessions.append(session)
                return await _run_session(session, service, headless=headless), session.last_frame
    except asyncio.CancelledError:
        return None


async def _run_session(session: Session, service: LocalRun, *, headless: bool) -> RunFigures:
    async with AsyncExitStack() as stack:
        if not headless:
            stack.enter_context(read_keyboard(session.handle_key))
            await stack.enter_async_context(_background_task(draw_frames(session.frame)))
        await service.wait_serving()
        return await session.run()


@asynccontextmanager
async def _open_session(options: PlayOptions, *, headless: bool) -> AsyncIterator[tuple[Session, LocalRun]]:
    """Start the service and open a session on it; leaving the context stops everything."""
    meta = options.service.metadata
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(
            run_local(options.objects, LocalRunOptions(port=options.port))
        )
        if not headless:
            log_to_file(service.folder / "operator.log")
        info = service.info
        client = await stack.enter_async_context(open_http_client(info.router_state_url, token=info.token))
        observer = Observer(
            service.store,
            meta.name,
            namespace=meta.namespace,
            router=HttpRouterClient(client),
            http=await stack.enter_async_context(httpx.AsyncClient(trust_env=False)),
            autoscaler_url=info.autoscaler_url,
        )
        store = await stack.enter_async_context(open_store(info.store_address))
        service_handle = ServiceHandle(
            store=store,
            endpoint=info.router_url,
            kill=service.kill,
            max_tokens=load_profile(options.service.spec.engine.profile).kv_capacity_tokens,
        )
        load = _make_load_generator(options, info.router_url)
        stack.push_async_callback(load.close)
        session = Session(options, service_handle, observer, load)
        if headless:
            observer.on_flip = lambda flip: _print_flip(session, flip)
        await stack.enter_async_context(_background_task(observer.run()))
        if options.web or options.record is not None:
            await stack.enter_async_context(_show_page(options, service, session, store))
        yield session, service


@asynccontextmanager
async def _show_page(
    options: PlayOptions, service: LocalRun, session: Session, store: Store
) -> AsyncIterator[None]:
    """Serve the live page inside the context, with its buttons, and record it, as the options say."""
    broadcast, controls = Broadcast(), PageControls(session, store, options.service)
    description = f"fulcrum play, process {service.info.pid}"
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_local_source(service.info, description))
        if options.web:
            serving = serve_page(broadcast, run_action=controls.run_action)
            address = await stack.enter_async_context(serving)
            print(f"live page {address}\nstop with Ctrl-C", flush=True)
        feed = Feed(store, options.service, broadcast, source, read_controls=controls.read_state)
        await stack.enter_async_context(_background_task(feed.run()))
        if options.record is not None:
            await stack.enter_async_context(_background_task(record(broadcast, options.record)))
        yield


def _make_load_generator(options: PlayOptions, url: str) -> LoadGenerator:
    host, port = split_address(url)
    target = LoadTarget(
        host=host,
        port=port,
        model=options.service.spec.model,
        chat_share=CHAT_SHARE,
        max_connections=MAX_CONNECTIONS,
    )
    return LoadGenerator(target, slo=options.service.spec.slo.to_slo(), seed=options.seed)


def _print_flip(session: Session, flip: RecordedFlip) -> None:
    print(
        f"{session.elapsed_s:6.1f} s  {flip.instance} {flip.from_role} → {flip.to}: {flip.reason}", flush=True
    )


@asynccontextmanager
async def _background_task(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `coroutine` inside the context; leaving the context cancels it and raises its error, if any."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Exception):
            raise result
