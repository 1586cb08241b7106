"""The dashboards over two minutes of load with flips, kills and three tiers: data, rules, series, pictures.

    make bench NAME=dashboards ARGS="[--for 120] [--pictures FOLDER]"

A real Prometheus (the Debian package) scrapes a local service. With `--pictures`, which needs Node.js, npm
(it downloads 470 MB once), Chromium and Playwright (`tools/install browser`), each dashboard is drawn by
Grafana's published components: every panel must be shown with the series that Prometheus answers with. Exit
code 1 if a query has no data, a rule fails, series exceed their bounds, or a picture lacks something.
"""

import argparse
import asyncio
import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kubernetes.monitoring.queries import (
    DASHBOARDS,
    GRAFANA_VALUES,
    PrometheusApi,
    list_queries,
    read_data,
)
from tests.kubernetes.monitoring.scenario import run_monitored_service

GRAFANA = Path(__file__).parent / "grafana"
ROW_PX, HEAD_PX, WIDTH_PX = 36, 60, 1600


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--for", dest="seconds", type=float, default=120.0)
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each dashboard")
    options = parser.parse_args()
    if options.pictures:
        build_page()
    with tempfile.TemporaryDirectory() as folder:
        async with run_monitored_service(Path(folder), seconds=options.seconds) as prometheus:
            now_s = int(time.time())
            data = await read_data(prometheus, for_s=options.seconds, now_s=now_s)
            print(data)
            failures = data.list_faults()
            if options.pictures:
                failures += await draw_all(prometheus, options.seconds, now_s, options.pictures)
    print("\n".join(failures) or "no failures")
    return bool(failures)


def build_page() -> None:
    """Install Grafana's components by the lock, and bundle the page that draws with them."""
    if not (GRAFANA / "node_modules").exists():
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=GRAFANA, check=True)
    subprocess.run(["node", "build.mjs"], cwd=GRAFANA, check=True)
    folder = GRAFANA / "out" / "dashboards"
    folder.mkdir(exist_ok=True)
    for file in DASHBOARDS:
        shutil.copy(file, folder)


async def draw_all(prometheus: PrometheusApi, seconds: float, now_s: int, folder: Path) -> list[str]:
    """Draw each dashboard into a PNG file; returns what differs from the dashboards' files."""
    from playwright.async_api import async_playwright

    folder.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        with serve_page() as address:
            for file in DASHBOARDS:
                values = {"__range": f"{seconds:.0f}s"}
                options = {
                    "dashboard": f"out/dashboards/{file.name}",
                    "prometheus": prometheus.url,
                    "now": str(now_s),
                    "seconds": f"{seconds:.0f}",
                    "vars": json.dumps(GRAFANA_VALUES | values),
                }
                url = f"{address}?{urllib.parse.urlencode(options)}"
                drawn = await draw(browser, url, file, folder / f"{file.stem}.png")
                answered = await count_answered(prometheus, file.stem, seconds, now_s)
                print(f"{file.stem}: {len(drawn)} panels, {sum(drawn.values())} series drawn")
                failures += [
                    f"{file.stem}, {title}: {drawn.get(title, 'not')} drawn, {count} answered"
                    for title, count in answered.items()
                    if drawn.get(title) != count
                ]
        await browser.close()
    return failures


async def draw(browser: Any, url: str, file: Path, picture: Path) -> dict[str, int]:
    """Draw a dashboard; returns the number of series of each panel that is shown."""
    dashboard = json.loads(file.read_text(encoding="utf-8"))
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    page = await browser.new_page(viewport={"width": WIDTH_PX, "height": rows * ROW_PX + HEAD_PX})
    await page.goto(url)
    await page.wait_for_function("document.title !== 'loading'", timeout=60_000)
    assert await page.title() == "READY", await page.title()
    await page.wait_for_timeout(1_000)  # charts are drawn after they were laid out
    await page.screenshot(path=picture)
    panels: list[dict[str, Any]] = await page.evaluate("window.panels")
    texts = "\n".join(await page.locator("section").all_inner_texts())
    await page.close()
    return {panel["title"]: len(panel["series"]) for panel in panels if panel["title"] in texts}


async def count_answered(
    prometheus: PrometheusApi, dashboard: str, seconds: float, now_s: float
) -> Counter[str]:
    """Series that Prometheus answers the queries of each panel with."""
    counts = Counter[str]()
    for query in list_queries():
        if query.dashboard == dashboard and not query.panel.startswith("annotation "):
            counts[query.panel] += await prometheus.count_series(query.expr, for_s=seconds, now_s=now_s)
    return counts


@contextmanager
def serve_page() -> Iterator[str]:
    """Serve the folder of the page on loopback; yields its address."""
    handler = functools.partial(QuietHandler, directory=str(GRAFANA))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
