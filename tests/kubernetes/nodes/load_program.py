"""Offers constant load and reports each time window as one JSON line; run by `load.Load`.

The process runs in a node's network, so that requests take a client's route: the Service's address,
kube-proxy, router. Each line of standard input closes the current window and opens the next, with the line as
its name. A closed window is reported as `{"window": …}` when its last request has ended. The end of the input
ends the load.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fulcrum_core.values import Slo
from fulcrum_simulator.client import LoadGenerator, LoadOutcome, LoadTarget, OutcomeKind
from fulcrum_simulator.workload import WorkloadRequest

FINISH_TIMEOUT_S = 15.0
"""Time for the last responses of a window; requests without one then count as unfinished."""
FAILURES_MAX = 200
"""Most failures that are reported one by one."""


def main() -> None:
    """Offer load until standard input ends."""
    options = argparse.ArgumentParser()
    options.add_argument("--host", required=True)
    options.add_argument("--port", type=int, default=80)
    options.add_argument("--model", required=True)
    options.add_argument("--rate", type=float, required=True, help="requests a second")
    options.add_argument("--input-tokens", type=int, required=True)
    options.add_argument("--output-tokens", type=int, required=True)
    options.add_argument("--tier", required=True)
    options.add_argument("--tenant", required=True)
    options.add_argument("--seed", type=int, required=True)
    asyncio.run(_run(options.parse_args()))


async def _run(options: argparse.Namespace) -> None:
    commands = await _open_standard_input()
    rng = random.Random(options.seed)
    ending: set[asyncio.Task[None]] = set()
    print(json.dumps({"window": "ready"}), flush=True)
    name = "start"
    while name:
        seed = rng.randrange(2**32)
        target = LoadTarget(host=options.host, port=options.port, model=options.model, chat_share=0.25)
        generator = LoadGenerator(target, slo=Slo(ttft_s=1.0, tpot_s=0.05), seed=seed)
        start_s = asyncio.get_running_loop().time()
        playing = asyncio.create_task(generator.send(_generate_requests(options), start_s=start_s))
        opened, name = name, await _read_window_name(commands)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        task = asyncio.create_task(_report_window(opened, generator, start_s, options.rate))
        ending.add(task)
        task.add_done_callback(ending.discard)
    await asyncio.gather(*ending)


async def _open_standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(0, "rb", closefd=False))
    return reader


async def _read_window_name(commands: asyncio.StreamReader) -> str:
    """Return the name of the next window; empty at the end of the input."""
    return (await commands.readline()).decode().strip()


def _generate_requests(options: argparse.Namespace) -> Iterator[WorkloadRequest]:
    gap_s = 1.0 / options.rate
    for index in itertools.count():
        yield WorkloadRequest(
            index * gap_s,
            options.input_tokens,
            options.output_tokens,
            tier=options.tier,
            tenant=options.tenant or None,
        )


async def _report_window(name: str, generator: LoadGenerator, start_s: float, rate: float) -> None:
    await generator.finish(timeout_s=FINISH_TIMEOUT_S)
    outcomes = [outcome for outcome in generator.results.outcomes if outcome.kind is not OutcomeKind.OK]
    lost = [_describe(outcome, start_s + outcome.index / rate) for outcome in outcomes]
    figures = asdict(generator.results.report()) | {"window": name, "failures": lost[:FAILURES_MAX]}
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def _describe(outcome: LoadOutcome, offered_s: float) -> dict[str, Any]:
    """Return one failure as JSON; `offered_s` is on the monotonic clock, common to all namespaces."""
    return {
        "offered_s": offered_s,
        "kind": outcome.kind,
        "error_reported": outcome.error_reported,
        "reason": outcome.reason,
    }


if __name__ == "__main__":
    main()
