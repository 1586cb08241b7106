"""The live page in real Chromium: what it shows, keys and buttons, access control, and 1,000 instances."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fulcrum_cli.simulation.page_states import build_states
from fulcrum_cli.web.broadcast import Broadcast
from fulcrum_cli.web.feed import Feed
from fulcrum_cli.web.recording import read_states, write_states
from fulcrum_cli.web.replay import Replay
from fulcrum_cli.web.server import serve_page
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_core.api import PDInstance
from fulcrum_core.ports import Store
from tests.live_page import SyntheticService
from tests.simulated_runs import run_equal_requests
from tests.waiting import wait_until

AGE_S = 60.0
"""Age of the synthetic service: it has flipped fifteen times."""
HEIGHT_MAX_PX = 200
"""Header, cards and panel have up to 189 px, as long texts in them scroll; else one had 517 px."""


def require_chromium() -> str:
    """Return the path of Chromium; leave the test out if it or Playwright is not installed."""
    path, missing = shutil.which("chromium"), "Chromium"
    if path is not None:
        try:
            import playwright.async_api  # noqa: F401 - is it installed?
        except ImportError:
            missing = "Playwright"
        else:
            return path
    reason = f"{missing} is not installed; make test-kubernetes installs it as root"
    if os.environ.get("KUBERNETES_TESTS") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
async def page() -> AsyncIterator[Any]:
    """An empty page of a new browser. Messages of its console and the hosts it called are its attributes."""
    path = require_chromium()
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        page = await browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="dark")
        page.messages = []
        page.called = set()
        page.on("console", lambda message: page.messages.append(message.text))
        page.on("pageerror", lambda error: page.messages.append(str(error)))
        page.on("request", lambda request: page.called.add(request.url.split("/")[2]))
        yield page
        await browser.close()


HOSTILE = "<img src=x onerror=\"document.title='attacked'\">\n'}{\\"
LONG = "x" * 253


class HostileService(SyntheticService):
    """A service whose texts are long, or HTML."""

    def __init__(self, count: int, *, start_s: float) -> None:
        super().__init__(count, start_s=start_s)
        self.names = [f"{'i' * 60}-{number}" for number in range(count)]
        spec = self.service.spec.model_copy(update={"model": (HOSTILE + LONG)[:253]})
        self.service = self.service.model_copy(update={"spec": spec})

    async def create(self, store: Store, *, now_s: float) -> None:
        await super().create(store, now_s=now_s)
        status = {"phase": "Failed", "message": HOSTILE + "m" * 10_240}
        await store.patch_status(PDInstance, self.names[0], status, namespace="default")

    def assignment(self, at_s: float) -> dict[str, Any]:
        spec = super().assignment(at_s)
        for entry in spec["roles"].values():
            entry["reason"] = (HOSTILE + 5 * LONG)[:1024]
        return spec

    def metrics(self, at_s: float) -> str:
        text = super().metrics(at_s)
        return text + "".join(text.replace('tier="default"', f'tier="{tier * 60}"') for tier in "abcdefgh")


class ShownService:
    """A synthetic service whose page is served, and the actions that the page asked for.

    Without `synthetic` it is one with `count` instances.
    """

    def __init__(
        self,
        count: int = 8,
        *,
        pools: int = 1,
        rate_rps: float = 12.0,
        synthetic: SyntheticService | None = None,
    ) -> None:
        self.synthetic = synthetic or SyntheticService(
            count, start_s=time.time() - AGE_S, pools=pools, rate_rps=rate_rps
        )
        self.actions: list[dict[str, Any]] = []
        self.too_slow = False

    @asynccontextmanager
    async def serve(self, *, port: int = 0) -> AsyncIterator[str]:
        store, broadcast = MemoryStore(SystemClock()), Broadcast()
        await self.synthetic.create(store, now_s=time.time())
        source = self.synthetic.source(time.time)
        feed = Feed(store, self.synthetic.service, broadcast, source, read_controls=self.read_controls)
        async with serve_page(broadcast, port=port, run_action=self.run_action) as address:
            task = asyncio.create_task(feed.run())
            try:
                yield address
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def read_controls(self) -> dict[str, Any]:
        return {"loads": ["moving", "steady"], "load": "moving", "started": True, "too_slow": self.too_slow}

    async def run_action(self, action: dict[str, Any]) -> str:
        self.actions.append(action)
        return "done"


async def test_the_page_shows_the_fleet_and_calls_no_other_host(page: Any) -> None:
    async with ShownService(8).serve() as address:
        await page.goto(address)
        await page.wait_for_selector(".tile:nth-of-type(8)")
        await page.wait_for_selector("text=12 per second")
        assert await page.locator(".tile").count() == 8
        names = await page.locator(".tile").evaluate_all("tiles => tiles.map(t => t.ariaLabel)")
        assert all("KV cache" in name for name in names)
        cut_off = "lines => lines.filter(line => line.scrollHeight > line.clientHeight).length"
        assert await page.locator(".tile-status").evaluate_all(cut_off) == 0
        assert await page.locator("[role=log] li").count() > 3
        assert page.called == {address.split("/")[2]}
        assert page.messages == []
        assert "#" not in page.url, "the token stays out of the address bar"
        await page.reload()
        await page.wait_for_selector(".tile")


async def test_keys_select_an_instance_and_buttons_change_it(page: Any) -> None:
    shown = ShownService(8)
    async with shown.serve() as address:
        await page.goto(address)
        await page.focus(".tile")
        before = await page.evaluate("document.activeElement.dataset.name")
        await page.keyboard.press("ArrowDown")
        name = await page.evaluate("document.activeElement.dataset.name")
        assert name != before
        await page.click("text=Drain")
        await page.click("text=Kill engine")
        await page.click("button:text('steady')")
        await page.wait_for_selector("[role=status]:text('done')")
        await wait_until(lambda: len(shown.actions) == 3, "all actions arrived")
        assert shown.actions == [
            {"action": "drain", "instance": name},
            {"action": "kill", "instance": name},
            {"action": "load", "load": "steady"},
        ]


async def test_a_page_of_another_origin_reads_and_changes_nothing(page: Any) -> None:
    shown = ShownService(2)
    async with shown.serve() as address:
        url, _, token = address.partition("#")
        app = web.Application()

        async def get_foreign(_request: web.Request) -> web.Response:
            return web.Response(text="<title>foreign</title>", content_type="text/html")

        app.add_routes([web.get("/", get_foreign)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            await page.goto(f"http://127.0.0.1:{runner.addresses[0][1]}/")
            script = """async ([url, token]) => {
                const call = (path, init) => fetch(url + path, init).then(r => r.status, () => "refused");
                const headers = {authorization: `Bearer ${token}`};
                const body = JSON.stringify({action: "kill", instance: "chat-0"});
                return [
                    await call("api/states", {headers}),
                    await call("api/actions", {method: "POST", headers, body}),
                    await call("api/actions", {method: "POST", mode: "no-cors", body}).then(() => "sent"),
                ];
            }"""
            assert await page.evaluate(script, [url, token]) == ["refused", "refused", "sent"]
            assert shown.actions == []
        finally:
            await runner.cleanup()


async def test_a_lost_connection_is_said_and_made_again(page: Any) -> None:
    shown = ShownService(2)
    async with shown.serve() as address:
        await page.goto(address)
        await page.wait_for_selector(".connection.open")
    await page.wait_for_selector("[role=alert]:text('Connection lost')")
    async with shown.serve(port=int(address.split(":")[2].split("/")[0])):
        await page.wait_for_selector("[role=alert]:text('Refused')")  # a new server has a new token


async def test_a_machine_that_is_too_slow_is_said(page: Any) -> None:
    shown = ShownService(2)
    shown.too_slow = True
    async with shown.serve() as address:
        await page.goto(address)
        await page.wait_for_selector("[role=alert]:text('Machine too slow')")


async def test_a_simulated_run_is_replayed_paused_and_moved(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.gz"
    run = run_equal_requests("arrow:1P3D", rate_rps=6.0, tokens=12_000)  # one instance is too slow: it flips
    write_states(build_states(run, load="a test"), file)
    replay, broadcast = Replay(read_states(file), file), Broadcast()
    async with serve_page(broadcast, run_action=replay.run_action) as address:
        task = asyncio.create_task(replay.run(broadcast))
        try:
            await page.goto(address)
            await page.wait_for_selector(".connection.open:text('replay')")
            await page.click("button:text('64×')")
            await page.wait_for_selector("[role=log] li:has-text('by the autoscaler')")
            await page.click("button:text('Pause')")
            await page.locator("input[type=range]").fill("30")
            await page.wait_for_selector("text=0:30 of")
            assert await page.locator(".tile").count() == 4
            assert await page.locator("button:text('Kill engine')").count() == 0
            assert page.messages == []
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("width", [1440, 700])
async def test_texts_that_are_long_or_html_are_shown_in_their_place(page: Any, width: int) -> None:
    shown = ShownService(synthetic=HostileService(8, start_s=time.time() - AGE_S))
    await page.set_viewport_size({"width": width, "height": 900})
    async with shown.serve() as address:
        await page.goto(address)
        await page.wait_for_selector(".tile.broken")
        await page.wait_for_selector("text=/aaaa/")
        await page.click(".tile.broken")
        await page.wait_for_selector(".panel .details b")
        wide = await page.evaluate(
            """() => [...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right
                > document.documentElement.clientWidth + 1).map(e => e.className)"""
        )
        assert wide == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        heights = (
            "names => names.map(n => Math.round(document.querySelector(n).getBoundingClientRect().height))"
        )
        assert [
            h for h in await page.evaluate(heights, ["header", ".card", ".panel"]) if h > HEIGHT_MAX_PX
        ] == []
        assert await page.locator("img").count() == 0
        assert (await page.title(), page.messages) == ("Fulcrum", [])


@pytest.mark.parametrize("count", [64, 1000])
async def test_all_tiles_lie_beside_one_another_inside_their_side(page: Any, count: int) -> None:
    async with ShownService(count, pools=3, rate_rps=3.0 * count).serve() as address:
        await page.goto(address)
        await page.wait_for_selector(f".tile:nth-of-type({count})", state="attached")
        boxes = await page.locator(".tile").evaluate_all(
            "tiles => tiles.map(t => t.getBoundingClientRect()).map(b => [b.left, b.top, b.width, b.height])"
        )
        stage = await page.locator(".stage").bounding_box()
        assert all(
            width >= 8 and left >= stage["x"] and top + height <= stage["y"] + stage["height"]
            for left, top, width, height in boxes
        )
        assert len({(round(left), round(top)) for left, top, *_ in boxes}) == count
        assert page.messages == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_the_theme_follows_the_system_until_it_is_chosen(page: Any, scheme: str) -> None:
    ground = {"dark": "rgb(11, 14, 20)", "light": "rgb(244, 246, 250)"}
    read_ground = "getComputedStyle(document.body).backgroundColor"
    await page.emulate_media(color_scheme=scheme)
    async with ShownService(2).serve() as address:
        await page.goto(address)
        await page.wait_for_selector(".theme")
        assert await page.evaluate(read_ground) == ground[scheme]
        await page.click(".theme")
        assert await page.evaluate(read_ground) == ground["dark"]
        await page.click(".theme")
        assert await page.evaluate(read_ground) == ground["light"]
