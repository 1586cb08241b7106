"""A steady load until told to stop: the process that a scenario talks to over its standard input and output.

It runs within a node's network, so that requests take the way a client's take: to the Service's address,
through kube-proxy, to the router. Its time is cut into windows, one for each thing that a scenario does; a
window ends when the last request offered in it has ended. Every line it prints is JSON: `{"window": …}` for
the figures of one that ended, after `window NAME` opened the next.
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
from fulcrum_simulator.client import Ending, LoadGenerator, Outcome, Target
from fulcrum_simulator.workload import WorkloadRequest

LAST_ANSWER_S = 15.0
"""How long a window waits for the last answers; what is left then counts as unfinished."""
SHOWN = 200
"""Requests without a right answer that are told one by one."""


def main() -> None:
    """Offers load until standard input ends."""
    options = argparse.ArgumentParser()
    options.add_argument("--host", required=True)
    options.add_argument("--port", type=int, default=80)
    options.add_argument("--model", required=True)
    options.add_argument("--rate", type=float, required=True, help="requests a second")
    options.add_argument("--input-tokens", type=int, default=48)
    options.add_argument("--output-tokens", type=int, default=6)
    options.add_argument("--seed", type=int, required=True)
    asyncio.run(_run(options.parse_args()))


async def _run(options: argparse.Namespace) -> None:
    commands = await _standard_input()
    rng = random.Random(options.seed)
    ending: set[asyncio.Task[None]] = set()
    print(json.dumps({"window": "ready"}), flush=True)
    name = "start"
    while name:
        seed = rng.randrange(2**32)
        target = Target(host=options.host, port=options.port, model=options.model, chat_share=0.25)
        window = LoadGenerator(target, slo=Slo(ttft_s=1.0, tpot_s=0.05), seed=seed)
        start_s = asyncio.get_running_loop().time()
        playing = asyncio.create_task(window.play(_steady(options), start_s=start_s))
        opened, name = name, await _next(commands)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        task = asyncio.create_task(_close(opened, window, start_s, options.rate))
        ending.add(task)
        task.add_done_callback(ending.discard)
    await asyncio.gather(*ending)


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(0, "rb", closefd=False))
    return reader


async def _next(commands: asyncio.StreamReader) -> str:
    """The name of the window that shall open now; empty at the end."""
    return (await commands.readline()).decode().strip()


def _steady(options: argparse.Namespace) -> Iterator[WorkloadRequest]:
    gap_s = 1.0 / options.rate
    for index in itertools.count():
        yield WorkloadRequest(index * gap_s, options.input_tokens, options.output_tokens)


async def _close(name: str, window: LoadGenerator, start_s: float, rate: float) -> None:
    await window.finish(timeout_s=LAST_ANSWER_S)
    outcomes = [outcome for outcome in window.tally.outcomes if outcome.ending is not Ending.OK]
    lost = [_told(outcome, start_s + outcome.index / rate) for outcome in outcomes]
    figures = asdict(window.tally.report()) | {"window": name, "lost": lost[:SHOWN]}
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def _told(outcome: Outcome, offered_s: float) -> dict[str, Any]:
    """`offered_s` is of the machine's monotonic clock, which every namespace shares."""
    return {"offered_s": offered_s, "ending": outcome.ending, "told": outcome.told, "reason": outcome.reason}


if __name__ == "__main__":
    main()
