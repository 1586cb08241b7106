"""Endurance of the router: a million requests, and ten thousand streams at once.

    ROUTER_BENCH=DIR python bench/endurance.py [--requests N] [--streams N] [--seconds S]

DIR is the folder of the harness, as for `bench/router.py`: its mock engines and its load generator are used.

* Requests: short prompts on 32 connections, each with one request at a time. Printed: requests, errors, and
  the memory of the router after each slice of the run.
* Streams: they begin within half a minute and get a token a second; one that ends is replaced by another.
  Each needs two connections of the router, so the limit of open files must allow for them; fewer are opened
  if it does not, and the output says so. At the end all that are open are disconnected at once: the stall of
  that is printed and has no bar.

Exit code 1 if a request failed, if memory changed by more than 5 % from the middle third of the requests to
the last, if not all streams that the limit allows were open at once, if memory exceeded 400 MB with all of
them open, or if a stall of the event loop (p99.99 of processor time) exceeded 20 ms.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.router import DECODE, PREFILL, build_programs
from tests.integration.router.measured_router import MeasuredRouter, run_measured_router

MODEL = "tiny"
SLICE_S = 15
OPENING_S = 30.0
"""Seconds in which the streams begin: their 20,000 new connections in one turn would be one long stall."""
RSS_CHANGE_MAX, STREAMS_RSS_MAX_BYTES, STALL_MAX_S = 0.05, 400_000_000, 0.020
_BEFORE_END_S = 1.0
"""Stalls in the last so many seconds of the streams are left out of p99.99."""
_SPARE_FILES = 1_024
"""Open files of the router apart from those of streams, generously."""


async def run(programs: Path, *, requests: int, streams: int, seconds: float) -> bool:
    """Run both parts, each with a new router; returns whether all bars are met."""
    with _run_mock_engines(programs):
        async with run_measured_router(PREFILL, DECODE) as router:
            await _wait_until_ready(router)
            met = await _send_many(programs, router, requests)
            met &= _report_stalls(router)
        _set_delays(prefill_us=1_000, first_token_us=1_000, token_us=1_000_000)
        async with run_measured_router(PREFILL, DECODE) as router:
            await _wait_until_ready(router)
            met &= await _hold_open(programs, router, _allowed_streams(streams), seconds)
            met &= _report_stalls(router)
            longest_ms = router.read_longest_stall_s() * 1e3
            print(f"longest stall with the end, when all clients disconnect at once: {longest_ms:.0f} ms")
    return met


async def _send_many(programs: Path, router: MeasuredRouter, requests: int) -> bool:
    sent, failed, memory = 0, 0, list[int]()
    while sent < requests:
        result = await _generate(programs, router, f"-c 32 -n 1 -w 0.1 -d {SLICE_S} -S {len(memory) + 1}")
        sent, failed = sent + result["ok"], failed + result["err"]
        memory.append(router.read_rss_bytes())
        print(f"{sent:9,} requests, {failed} failed, RSS {memory[-1] / 1e6:.1f} MB", flush=True)
    third = max(1, len(memory) // 3)
    change = statistics.mean(memory[-third:]) / statistics.mean(memory[third:-third] or memory) - 1
    print(f"memory, last third of the run against the middle one: {change:+.1%}")
    return failed == 0 and abs(change) <= RSS_CHANGE_MAX


async def _hold_open(programs: Path, router: MeasuredRouter, streams: int, seconds: float) -> bool:
    rate = streams / OPENING_S
    arguments = f"-r {rate} -c {streams} -s -n {int(seconds)} -w 0.1 -d {OPENING_S + seconds} -S 1"
    generating = asyncio.create_task(_generate(programs, router, arguments))
    memory, most_open = list[int](), 0
    asyncio.get_running_loop().call_later(OPENING_S + seconds - _BEFORE_END_S, router.keep_stalls)
    while not generating.done():
        memory.append(router.read_rss_bytes())
        most_open = max(most_open, await asyncio.to_thread(_read_open_requests, router))
        await asyncio.wait([generating], timeout=1.0)
    result = await generating
    print(
        f"{streams:,} streams: at most {most_open:,} open at once, {result['ok']:,} ended, "
        f"{result['err']} failed, RSS at most {max(memory) / 1e6:.0f} MB, "
        f"p99 between two events {result['gap'][1]:.0f} ms"
    )
    return result["err"] == 0 and most_open == streams > 0 and max(memory) <= STREAMS_RSS_MAX_BYTES


async def _generate(programs: Path, router: MeasuredRouter, arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        programs / "loadgen", "-u", str(router.port), "-m", MODEL, *arguments.split(), stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    result: dict[str, Any] = json.loads(output)
    return result


def _allowed_streams(requested: int) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = requested if hard == resource.RLIM_INFINITY else min(requested, (hard - _SPARE_FILES) // 2)
    if allowed < requested:
        print(f"the limit of {hard:,} open files allows {allowed:,} streams of {requested:,}")
    return allowed


async def _wait_until_ready(router: MeasuredRouter) -> None:
    url = f"http://127.0.0.1:{router.port}/ready"

    def ready() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return True
        return False

    while not await asyncio.to_thread(ready):
        await asyncio.sleep(0.1)


def _read_open_requests(router: MeasuredRouter) -> int:
    """Sum the decode legs in flight over all instances."""
    with urllib.request.urlopen(f"http://127.0.0.1:{router.metrics_port}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return sum(
        int(float(line.split()[-1]))
        for line in lines
        if line.startswith("fulcrum_router_instance_decode_legs{")
    )


@contextlib.contextmanager
def _run_mock_engines(programs: Path) -> Iterator[None]:
    ports = ",".join(str(port) for port in (*PREFILL, *DECODE))
    with subprocess.Popen([programs / "mockvllm", "-m", MODEL, "-l", ports]) as process:
        try:
            yield
        finally:
            process.terminate()


def _set_delays(*, prefill_us: int, first_token_us: int, token_us: int) -> None:
    query = f"t={prefill_us}&T={first_token_us}&i={token_us}"
    urllib.request.urlopen(f"http://127.0.0.1:{PREFILL[0]}/mock/set?{query}", timeout=5).close()


def _report_stalls(router: MeasuredRouter) -> bool:
    router.end()
    stalls = router.read_stalls()
    print(
        f"stalls of the event loop, processor time: p99.99 {stalls.cpu_p9999_s * 1e3:.1f} ms, "
        f"longest {stalls.cpu_max_s * 1e3:.1f} ms"
    )
    print(stalls.describe_callbacks())
    return stalls.cpu_p9999_s <= STALL_MAX_S


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both parts and print the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests in all (%(default)s)")
    parser.add_argument("--streams", type=int, default=10_000, help="streams at once (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="of each stream (%(default)s)")
    options = parser.parse_args(arguments)
    folder = os.environ.get("ROUTER_BENCH")
    if not folder or not (Path(folder) / "loadgen.c").is_file():
        print(f"error: ROUTER_BENCH ({folder or 'nothing'}) is not a folder with loadgen.c", file=sys.stderr)
        return 2
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fulcrum" / "bench-router"
    programs = build_programs(Path(folder), cache)
    met = asyncio.run(
        run(programs, requests=options.requests, streams=options.streams, seconds=options.seconds)
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
