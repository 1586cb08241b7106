"""The metrics port, without a token: metrics for Prometheus, a health check, and recorded requests.

A page of a large fleet takes tens of milliseconds to render. It is rendered at most once a second, however
many ask, and in slices with turns of the event loop between them, so that no request waits for it. The
clients' port has no metrics: clients could have pages rendered while requests are parsed.

The kubelet does not check the clients' port: when clients use all of its connections, the router refuses
more, and would be restarted.

A scraper that takes OpenMetrics, as Prometheus does, gets exemplars: the trace ids of some requests.

A page of 1,000 instances has a megabyte. Who does not read it is disconnected: else each connection that is
allowed here could keep another page in the router's memory. `server` opens the port.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from fulcrum_router.control.requests_page import RequestsPage

MIN_RENDER_INTERVAL_S = 1.0
"""Shortest time between two renderings; requests in between get the last page."""
SLICE_SAMPLES = 500
"""Samples that are rendered without a turn of the event loop: about 2 ms."""
READ_TIMEOUT_S = 10.0
"""Time in which a page must have been read: that of Prometheus for a scrape."""
_OPEN_METRICS_TYPE, _OPEN_METRICS_END = "application/openmetrics-text", b"# EOF\n"


class MetricsPage:
    """The metrics of one router as a page.

    Args:
        registry: What the page shows.
        open_metrics: Whether the page is in the OpenMetrics format, with exemplars, or in Prometheus' own.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        registry: Collector,
        *,
        open_metrics: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._clock, self._open_metrics = registry, clock, open_metrics
        self._rendering: asyncio.Task[bytes] | None = None
        self._started_s = 0.0

    async def read(self) -> bytes:
        """The page, at most `MIN_RENDER_INTERVAL_S` and a rendering old."""
        rendering, now_s = self._rendering, self._clock()
        if rendering is None or (rendering.done() and now_s >= self._started_s + MIN_RENDER_INTERVAL_S):
            self._rendering = rendering = asyncio.get_running_loop().create_task(self._render())
            self._started_s = now_s
        # A client that disconnects must not cancel the page of the others.
        return await asyncio.shield(rendering)

    async def _render(self) -> bytes:
        slices: list[bytes] = []
        for family in self._registry.collect():
            for text in _render_slices(family, open_metrics=self._open_metrics):
                slices.append(text)
                await asyncio.sleep(0)
        if self._open_metrics:
            slices.append(_OPEN_METRICS_END)
        return b"".join(slices)


class _OneFamily(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def _render_slices(family: Metric, *, open_metrics: bool) -> Iterator[bytes]:
    """Render some samples of a family after the other; the first slice begins with its two comments."""
    samples, family.samples = family.samples, []
    if open_metrics:
        page: bytes = openmetrics.generate_latest(_OneFamily(family))  # type: ignore[no-untyped-call]
        yield page.removesuffix(_OPEN_METRICS_END)
    else:
        yield generate_latest(_OneFamily(family))
    for start in range(0, len(samples), SLICE_SAMPLES):
        lines = [
            f"{_render_sample(sample)}{_render_exemplar(sample) if open_metrics else ''}\n"
            for sample in samples[start : start + SLICE_SAMPLES]
        ]
        yield "".join(lines).encode()


def _render_sample(sample: Sample) -> str:
    """Render a sample as the library does, in a third of its time: our names need no check."""
    value: str = floatToGoString(sample.value)  # type: ignore[no-untyped-call]  # the library has no types here
    labels = sample.labels
    if not labels:
        return f"{sample.name} {value}"
    pairs = ",".join([f'{name}="{_escape(labels[name])}"' for name in sorted(labels)])
    return f"{sample.name}{{{pairs}}} {value}"


def _render_exemplar(sample: Sample) -> str:
    exemplar = sample.exemplar
    if exemplar is None:
        return ""
    pairs = ",".join(f'{name}="{value}"' for name, value in exemplar.labels.items())
    return f" # {{{pairs}}} {exemplar.value} {exemplar.timestamp}"


def _escape(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class _PageResponse(web.Response):
    """A page that must be read in time; the connection of a slower reader is closed."""

    def __init__(self, request: web.Request, page: bytes, content_type: str, timeout_s: float) -> None:
        super().__init__(body=page, headers={"content-type": content_type})
        self._transport, self._timeout_s = request.transport, timeout_s

    async def write_eof(self, data: bytes = b"") -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await super().write_eof(data)
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()


def make_metrics_app(
    registry: Collector, requests_page: RequestsPage, *, read_timeout_s: float = READ_TIMEOUT_S
) -> web.Application:
    """Make the application of the metrics port: `/metrics`, `/health` and `/requests`."""
    plain, open_metrics = MetricsPage(registry), MetricsPage(registry, open_metrics=True)

    async def get_metrics(request: web.Request) -> web.Response:
        if _OPEN_METRICS_TYPE in request.headers.get("accept", ""):
            page, content_type = open_metrics, openmetrics.CONTENT_TYPE_LATEST
        else:
            page, content_type = plain, CONTENT_TYPE_PLAIN_0_0_4
        return _PageResponse(request, await page.read(), content_type, read_timeout_s)

    async def get_health(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", get_metrics),
            web.get("/health", get_health),
            web.get("/requests", requests_page.respond),
        ]
    )
    return app
