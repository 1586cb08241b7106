"""Our client of an API server compared with the async client that `kubernetes` ships: memory and CPU.

A server process responds to every patch with a PDInstance, and to every watch with `--events` changes of it.
Each client runs in a process of its own, the two in turns.

    make bench NAME=cluster_client ARGS="[--events 5000] [--patches 1000] [--rounds 3]"
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tools.kubernetes.waiting import wait_for

INSTANCE = {
    "apiVersion": "fulcrum.dev/v1alpha1",
    "kind": "PDInstance",
    "metadata": {
        "name": "chat-0",
        "namespace": "default",
        "uid": "u",
        "resourceVersion": "1",
        "generation": 1,
    },
    "spec": {"service": "chat", "pool": "chat-flex", "model": "m", "engine": {"type": "Simulated"}},
    "status": {"phase": "Serving", "role": "Decode", "endpoint": "127.0.0.1:8000", "restarts": 0},
}
PATH = "/apis/fulcrum.dev/v1alpha1/namespaces/default/pdinstances"
Figures = dict[str, float]


def serve(port: int, events: int) -> None:
    """Run the API server of the measurement until it is killed."""
    event = json.dumps({"type": "MODIFIED", "object": INSTANCE}).encode() + b"\n"

    async def patch(_request: web.Request) -> web.Response:
        return web.json_response(INSTANCE)

    async def watch(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        for _ in range(events // 50):
            await response.write(event * 50)
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_patch(f"{PATH}/chat-0", patch)
    app.router.add_get(PATH, watch)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


async def run_ours(port: int, events: int, patches: int) -> Figures:
    """Watch and patch with our client."""
    from fulcrum_cluster.client import ClusterClient
    from fulcrum_cluster.client_config import ClientConfig
    from fulcrum_cluster.objects import kind_of_resource
    from fulcrum_core.api import PDInstance

    kind = kind_of_resource(PDInstance)
    async with ClusterClient(ClientConfig(url=f"http://127.0.0.1:{port}")) as cluster:
        seen, began_s = 0, time.process_time()
        async for _ in cluster.objects.watch(kind, namespace="default", since="1"):
            seen += 1
        watched_s = time.process_time() - began_s
        assert seen == events
        waits_s, began_s = [], time.process_time()
        for _ in range(patches):
            at_s = time.perf_counter()
            await cluster.objects.patch(kind, "chat-0", {"status": {}}, namespace="default")
            waits_s.append(time.perf_counter() - at_s)
        return _figures(watched_s / events, time.process_time() - began_s, waits_s)


async def run_theirs(port: int, events: int, patches: int) -> Figures:
    """Watch and patch with `kubernetes.aio`, with objects as dictionaries."""
    from kubernetes.aio import client, watch

    configuration = client.Configuration(host=f"http://127.0.0.1:{port}")
    kind = ("fulcrum.dev", "v1alpha1", "default", "pdinstances")
    async with client.ApiClient(configuration) as connection:
        api = client.CustomObjectsApi(connection)
        seen, began_s = 0, time.process_time()
        async with watch.Watch() as stream:  # type: ignore[no-untyped-call]  # the library has no types there
            async for _ in stream.stream(api.list_namespaced_custom_object, *kind, timeout_seconds=20):
                seen += 1
                if seen == events:
                    break
        watched_s = time.process_time() - began_s
        waits_s, began_s = [], time.process_time()
        for _ in range(patches):
            at_s = time.perf_counter()
            await api.patch_namespaced_custom_object(*kind, "chat-0", {"status": {}})
            waits_s.append(time.perf_counter() - at_s)
        return _figures(watched_s / events, time.process_time() - began_s, waits_s)


def _figures(event_s: float, patches_s: float, waits_s: list[float]) -> Figures:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "cpu_us_per_event": round(event_s * 1e6, 1),
        "cpu_us_per_patch": round(patches_s / len(waits_s) * 1e6, 1),
        "patch_median_ms": round(statistics.median(waits_s) * 1e3, 2),
        "rss_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
    }


def connect(port: int) -> None:
    """Connect to a port of this machine.

    Raises:
        OSError: if nothing accepts connections there.
    """
    socket.create_connection(("127.0.0.1", port)).close()


def measure(run: Callable[..., Any], port: int, events: int, patches: int, results: Any) -> None:
    """Run one client in this process and hand over its figures."""
    results.put(asyncio.run(run(port, events, patches)))


def main() -> int:
    """Print the medians of all rounds for both clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=5000, help="a multiple of 50")
    parser.add_argument("--patches", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18473)
    args = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    server = processes.Process(target=serve, args=(args.port, args.events))
    server.start()
    rows: dict[str, list[Figures]] = {"run_ours": [], "run_theirs": []}
    try:
        wait_for(lambda: connect(args.port), "the server to accept connections", timeout_s=60)
        for _ in range(args.rounds):
            for run in (run_ours, run_theirs):
                results = processes.Queue()
                client = processes.Process(
                    target=measure, args=(run, args.port, args.events, args.patches, results)
                )
                client.start()
                rows[run.__name__].append(results.get(timeout=120))
                client.join()
    finally:
        server.terminate()
        server.join()
    for name, found in rows.items():
        medians = {key: statistics.median(row[key] for row in found) for key in found[0]}
        print(name.removeprefix("run_"), json.dumps(medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
