"""A service of any size for tests of the live page: objects in a store, and metrics as a router writes them.

`bench/live_page.py` uses it, too. Every figure is a function of the time, so that a page shows the same for
the same time. There is no engine and no request.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from fulcrum_cli.web.sources import FeedSource
from fulcrum_core.api import PDAssignment, PDInstance, PDService
from fulcrum_core.ports import Store
from fulcrum_core.values import Role
from tests.objects import make_object

POOLS = ("h100", "h200", "l40s")
TTFT_EDGES = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
TPOT_EDGES = (0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1)
FLIP_EVERY_S = 4.0
FLOWS_PER_INSTANCE = 4
FLIP_REASON = "prefill load 0.31 is at most 0.60 and decode load 0.72 is at least 0.60, for 2 ticks"


class SyntheticService:
    """The service `chat` with `count` instances in `pools` pools and `rate_rps` requests a second."""

    def __init__(self, count: int, *, start_s: float, pools: int = 1, rate_rps: float = 12.0) -> None:
        self.names = [f"chat-{number}" for number in range(count)]
        self._pools, self._rate_rps, self._start_s = pools, rate_rps, start_s
        self.service = make_object(
            PDService, "chat",
            {"model": "Qwen/Qwen3-32B", "instances": count, "slo": {"ttft": "1.5s", "tpot": "50ms"}},
        )  # fmt: skip

    def role(self, number: int, at_s: float) -> Role:
        """Role of an instance: three in eight prefill, and one instance flips every `FLIP_EVERY_S`."""
        flips = sum(flipped == number for flipped in self.flipped(at_s))
        first = Role.PREFILL if number % 8 < 3 else Role.DECODE
        return first if flips % 2 == 0 else first.other

    def flipped(self, at_s: float) -> Sequence[int]:
        """Numbers of the instances that have flipped by then, in order."""
        flips = int((at_s - self._start_s) / FLIP_EVERY_S)
        return [(7 * flip + 2) % len(self.names) for flip in range(flips)]

    async def create(self, store: Store, *, now_s: float) -> None:
        """Create the service's objects."""
        await store.create(self.service)
        for number, name in enumerate(self.names):
            pool = POOLS[number % self._pools]
            spec = {"service": "chat", "pool": pool, "model": "m", "engine": {"type": "Simulated"}}
            await store.create(make_object(PDInstance, name, spec))
            role = self.role(number, now_s)
            await store.patch_status(
                PDInstance, name, {"phase": "Serving", "role": role}, namespace="default"
            )
        await store.create(make_object(PDAssignment, "chat", self.assignment(now_s)))

    def assignment(self, at_s: float) -> dict[str, Any]:
        """The spec of the PDAssignment."""
        flipped = self.flipped(at_s)
        roles = {}
        for number, name in enumerate(self.names):
            flips = [index for index, found in enumerate(flipped) if found == number]
            since_s = self._start_s + (FLIP_EVERY_S * (flips[-1] + 1) if flips else 0.0)
            roles[name] = {
                "role": self.role(number, at_s).value,
                "since": _format_time(since_s),
                "by": "Autoscaler" if flips else "Operator",
                "reason": FLIP_REASON if flips else "first split",
            }
        return {"service": "chat", "roles": roles, "flips": len(flipped)}

    def metrics(self, at_s: float) -> str:
        """The text of the router's `/metrics`."""
        return "\n".join(self._lines(at_s)) + "\n"

    def source(self, clock: Callable[[], float]) -> FeedSource:
        """Router and autoscaler for a feed; `clock` returns unix time."""

        async def read_metrics() -> str:
            return self.metrics(clock())

        async def read_decisions() -> Sequence[dict[str, Any]]:
            return [
                {
                    "action": "refuse",
                    "to": "Prefill",
                    "at_s": self._start_s,
                    "reason": "the cooldown lasts 3 s",
                }
            ]

        return FeedSource(
            description="a synthetic service", read_metrics=read_metrics, read_decisions=read_decisions
        )

    def _lines(self, at_s: float) -> Iterator[str]:
        prefix = "fulcrum_router"
        served = self._rate_rps * (at_s - self._start_s)
        yield from self._instance_lines(at_s)
        yield from self._transfer_lines(served)
        yield f'{prefix}_requests_offered_total{{tier="default"}} {served + 9}'
        yield f'{prefix}_requests_total{{tier="default",outcome="ok"}} {served}'
        yield f'{prefix}_requests_slo_met_total{{tier="default"}} {served * 0.987}'
        yield f"{prefix}_output_tokens_total {served * 90}"
        yield f"{prefix}_waiting_requests {3 + 3 * math.sin(at_s):.0f}"
        yield f"{prefix}_assignment_generation 1.0"
        yield f"{prefix}_active 1.0"
        swing = 0.85 + 0.15 * math.sin(at_s / 9)
        for family, edges in (("ttft", TTFT_EDGES), ("tpot", TPOT_EDGES)):
            for edge in (*edges, math.inf):
                share = 1.0 if edge == math.inf else 1 - math.exp(-4.2 * edge / edges[-3] / swing)
                label = "+Inf" if edge == math.inf else edge
                yield f'{prefix}_{family}_seconds_bucket{{le="{label}",tier="default"}} {served * share}'

    def _instance_lines(self, at_s: float) -> Iterator[str]:
        for number, name in enumerate(self.names):
            role = self.role(number, at_s)
            wave = 0.5 + 0.5 * math.sin(at_s / 5 + number * 1.7)
            prefill = role is Role.PREFILL
            values = {
                "serving": 1.0,
                "prefill_queued_seconds": round(1.3 * wave, 3) if prefill else 0.0,
                "prefill_legs": round(4 * wave) if prefill else 0,
                "decode_legs": 0 if prefill else round(4 + 14 * wave),
                "decode_tokens": 0 if prefill else round(1200 + 9000 * wave),
                "kv_usage_ratio": round(0.04 * wave if prefill else 0.15 + 0.7 * wave, 4),
                "missed_probes": 0,
                "ejected": 0.0,
            }
            for field, value in values.items():
                labels = f'instance="{name}",role="{role.lower()}"'
                yield f"fulcrum_router_instance_{field}{{{labels}}} {value}"

    def _transfer_lines(self, served: float) -> Iterator[str]:
        prefill = [n for n in range(len(self.names)) if n % 8 < 3]
        decode = [n for n in range(len(self.names)) if n % 8 >= 3]
        pairs = [(p, decode[(5 * p + k) % len(decode)]) for p in prefill for k in range(FLOWS_PER_INSTANCE)]
        for p, d in sorted(set(pairs)):
            labels = f'prefill="{self.names[p]}",decode="{self.names[d]}",outcome="verified"'
            yield f"fulcrum_router_kv_transfers_total{{{labels}}} {served / len(pairs):.0f}"


def _format_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
