"""Sends loads of several tiers to a service with real engines. The benches with vLLM send with it too."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fulcrum_cli.local.run_folder import RunInfo
from fulcrum_core.values import Slo
from fulcrum_simulator.client import LoadGenerator, LoadResults, LoadTarget, OutcomeKind, split_address
from fulcrum_simulator.workload import WorkloadRequest
from tests.engines.services import MODEL

FINISH_S = 120.0
"""Longest wait for the responses after the last request."""
LARGER_MODEL = ("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 12}')
"""Arguments of engines with 12 layers of random weights in place of two: what limits a service then is its
engines, and not the programs around them."""


@dataclass(frozen=True, slots=True)
class Sender:
    """One tenant's Poisson arrivals, with lengths drawn evenly from two ranges of tokens."""

    tier: str
    rate_rps: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    start_s: float = 0.0

    def draw(self, rng: random.Random, *, end_s: float) -> Iterator[WorkloadRequest]:
        """Draw the requests until `end_s`."""
        at_s = self.start_s
        while (at_s := at_s + rng.expovariate(self.rate_rps)) < end_s:
            lengths = rng.randint(*self.prompt_tokens), rng.randint(*self.output_tokens)
            yield WorkloadRequest(at_s, *lengths, tenant=self.tier, tier=self.tier)


def draw_load(senders: Iterable[Sender], *, end_s: float, seed: str) -> list[WorkloadRequest]:
    """Draw the requests of all senders, by arrival; what one sends does not depend on the others."""
    drawn = (
        request
        for number, sender in enumerate(senders)
        for request in sender.draw(random.Random(f"{seed}/{number}"), end_s=end_s)
    )
    return sorted(drawn, key=lambda request: request.arrival_s)


def draw_burst(
    prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], *, count: int, seed: str
) -> list[WorkloadRequest]:
    """Draw requests without a tier that arrive all at once."""
    rng = random.Random(seed)
    return [
        WorkloadRequest(0.0, rng.randint(*prompt_tokens), rng.randint(*output_tokens)) for _ in range(count)
    ]


def measure_rate_rps(results: LoadResults) -> float:
    """Requests a second that a service completed of a burst, without the first and the last tenth."""
    ends_s = sorted(outcome.end_s for outcome in results.outcomes if outcome.kind is OutcomeKind.OK)
    tenth = len(ends_s) // 10
    return (len(ends_s) - 2 * tenth - 1) / (ends_s[-1 - tenth] - ends_s[tenth])


async def send_load(
    info: RunInfo, requests: Iterable[WorkloadRequest], *, slo: Slo, seed: int
) -> LoadResults:
    """Send the requests, and return their outcomes once all have ended.

    The seed decides the prompts: with another one, no prefix cache holds a block of them.
    """
    host, port = split_address(info.router_url)
    target = LoadTarget(host=host, port=port, model=MODEL, has_real_model=True)
    generator = LoadGenerator(target, slo=slo, seed=seed)
    try:
        await generator.send(requests)
        await generator.finish(timeout_s=FINISH_S)
    finally:
        await generator.close()
    return generator.results
