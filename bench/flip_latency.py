"""Latency of a flip on a real API server, from the decision to the router's acknowledgement, under load.

One control plane, one router, engine servers as processes. Instances are flipped one after another as the
autoscaler does: with `update_assignment`, acknowledged at the state port.

    make bench NAME=flip_latency ARGS="[--flips 300] [--rate 50] [--engines 4]"

Needs Linux and root, like the Kubernetes levels of the tests. Exit code 1 if the bar is missed (p99 100 ms
from the decision to the generation applied) or a request failed.
"""

import argparse
import asyncio
import itertools
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from fulcrum_cluster.assignment_write import update_assignment
from fulcrum_cluster.client import open_store
from fulcrum_cluster.clock import SystemClock
from fulcrum_core.api import PDAssignment, PDAssignmentSpec, PDPool, PDService
from fulcrum_core.assignment import build_flip
from fulcrum_core.ports import Store
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Actor, Role
from fulcrum_simulator.percentile import percentile
from fulcrum_simulator.text import output_text, prompt_digest
from tests.kubernetes.clusters import run_control_plane, temporary_namespace
from tests.kubernetes.control_plane.service_stack import (
    MODEL,
    SERVICE,
    RoutedService,
    RouterProcess,
    engine_servers,
    routed,
)
from tests.waiting import wait_until
from tools.kubernetes.waiting import wait_for

APPLIED_P99_MAX_S = 0.1
TOKENS = 4
POLL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class FlipTiming:
    """One flip; times in seconds from the decision."""

    written_s: float
    """API server responded to the write."""
    applied_s: float
    """Router applied the generation, by the same machine's clock."""
    poll_answered_s: float
    """Long poll at the state port returned."""


async def measure_flips(stack: RoutedService, router: RouterProcess, count: int) -> list[FlipTiming]:
    """Flip each instance to the other role and back, one flip after the other is acknowledged."""
    done: list[FlipTiming] = []
    headers = {"authorization": f"Bearer {stack.token}"}
    async with open_store(stack.store) as store, aiohttp.ClientSession(headers=headers) as session:
        names = list(stack.engines)
        for turn in range(count):
            done.append(await _measure_flip(store, session, stack, router, names[turn // 2 % len(names)]))
            await asyncio.sleep(0.02)  # so that no flip profits from a watch that is busy with the one before
    return done


async def _measure_flip(
    store: Store, session: aiohttp.ClientSession, stack: RoutedService, router: RouterProcess, name: str
) -> FlipTiming:
    current = await store.get(PDAssignment, SERVICE, namespace=stack.namespace)
    service = await store.get(PDService, SERVICE, namespace=stack.namespace)
    pools = (await store.list(PDPool, namespace=stack.namespace)).items
    to = Role.DECODE if current.spec.roles[name].role is Role.PREFILL else Role.PREFILL
    query = {"min_generation": str(current.metadata.generation + 1), "timeout_s": str(POLL_TIMEOUT_S)}
    polling = asyncio.create_task(_poll(session, f"{router.state_url}/state", query))
    decided_s = time.time()

    async def propose(assignment: PDAssignment) -> PDAssignmentSpec:
        return build_flip(assignment.spec, name, to, by=Actor.PERSON, reason="bench", now_s=decided_s)

    update = await update_assignment(
        store,
        SERVICE,
        propose,
        namespace=stack.namespace,
        clock=SystemClock(),
        attempts_max=1,
        current=current,
        configuration=(service, pools),
    )
    if not update.changed:
        raise RuntimeError(update.refusal)
    written_s = time.time()
    state, poll_answered_s = await polling
    if state.generation <= current.metadata.generation:
        raise RuntimeError(f"the router stays at generation {state.generation}")
    return FlipTiming(written_s - decided_s, state.acknowledged_at_s - decided_s, poll_answered_s - decided_s)


async def _poll(
    session: aiohttp.ClientSession, url: str, query: Mapping[str, str]
) -> tuple[RouterState, float]:
    async with session.get(url, params=query) as response:
        content = await response.read()
        poll_answered_s = time.time()
        return RouterState.model_validate_json(content), poll_answered_s


class CheckedLoad:
    """Constant load; each response is checked."""

    def __init__(self, url: str, rate: float) -> None:
        self._url, self._rate = url, rate
        self.completed = self.wrong = 0

    async def run(self) -> None:
        """Send until cancelled; then wait for the requests in flight."""
        began_s, running = time.monotonic(), set[asyncio.Task[None]]()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            try:
                for number in itertools.count():
                    await asyncio.sleep(max(0.0, began_s + number / self._rate - time.monotonic()))
                    task = asyncio.create_task(self._send(session, number))
                    running.add(task)
                    task.add_done_callback(running.discard)
            finally:
                if running:
                    await asyncio.wait(running)

    async def _send(self, session: aiohttp.ClientSession, number: int) -> None:
        prompt = f"{number} {secrets.token_hex(16)} " * 4
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS}
        async with session.post(self._url, json=body) as response:
            content: Any = await response.json()
            right = response.status == 200 and content["choices"][0]["text"] == output_text(
                prompt_digest(prompt.encode()), TOKENS
            )
        self.completed += 1
        self.wrong += not right


async def measure(
    stack: RoutedService, router: RouterProcess, args: argparse.Namespace
) -> tuple[list[FlipTiming], CheckedLoad]:
    """Measure flips under load."""
    load = CheckedLoad(router.url, args.rate)
    loading = asyncio.create_task(load.run())
    await wait_until(lambda: load.completed >= args.rate, "as many responses as are sent in a second")
    done = await measure_flips(stack, router, args.flips)
    loading.cancel()
    await asyncio.wait([loading])
    return done, load


def main() -> int:
    """Print the figures; return the exit code."""
    args = _parser().parse_args()
    autoscaling = {"mode": "Off", "flip": {"prefillToDecodeCooldown": "0s"}}
    with (
        run_control_plane() as control_plane,
        temporary_namespace(control_plane) as namespace,
        engine_servers(args.engines) as engines,
        routed(control_plane, namespace, engines, autoscaling=autoscaling) as stack,
    ):
        router = stack.start_router()
        router.process.wait_ready()
        wait_for(lambda: stack.serving(router) == set(engines), "all engines to serve")
        done, load = asyncio.run(measure(stack, router, args))
    print(f"{len(done)} flips, {load.completed} requests at {args.rate:g}/s, {load.wrong} failed or wrong")
    for name, label in (
        ("written_s", "decision to written"),
        ("applied_s", "decision to generation applied"),
        ("poll_answered_s", "decision to poll response"),
    ):
        values = sorted(getattr(flip, name) for flip in done)
        shown = [f"p{share} {1000 * (percentile(values, share) or 0):6.1f} ms" for share in (50, 90, 99)]
        print(f"{label:32}", "  ".join(shown), f" max {1000 * values[-1]:6.1f} ms")
    applied_p99_s = percentile([flip.applied_s for flip in done], 99)
    return int(load.wrong > 0 or applied_p99_s is None or applied_p99_s > APPLIED_P99_MAX_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second (%(default)s)")
    parser.add_argument("--engines", type=int, default=4)
    return parser


if __name__ == "__main__":
    sys.exit(main())
