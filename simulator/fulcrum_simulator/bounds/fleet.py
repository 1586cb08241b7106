"""What every bound is computed for: identical instances, and the SLO that their requests should meet.

The other modules of this package take the durations of prompts and steps from it. It simulates nothing.
"""

from dataclasses import dataclass

from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import Slo
from fulcrum_simulator.workload.requests import WorkloadRequest


@dataclass(frozen=True, slots=True)
class UniformFleet:
    """`instances` instances of one profile, and the SLO that counts a request as on time."""

    instances: int
    profile: EngineProfile
    slo: Slo

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise InvalidInput("instances", self.instances, "must be at least 1")

    def prefill_work_s(self, request: WorkloadRequest) -> float:
        """Return the seconds of one instance that the prompt needs at least: b·n + c·n².

        The fixed duration t0 of the steps is left out, since a prompt can be computed in steps that decode
        anyway; so is the mixed factor.
        """
        tokens = request.input_tokens
        return (self.profile.b + self.profile.c * tokens) * tokens

    def prefill_alone_s(self, request: WorkloadRequest) -> float:
        """Return the seconds of a prompt that runs alone on an instance: ceil(n/budget)·t0 + b·n + c·n²."""
        steps = -(-request.input_tokens // self.profile.token_budget)
        return steps * self.profile.t0 + self.prefill_work_s(request)

    def decode_work_s(self, request: WorkloadRequest) -> float:
        """Return the seconds of decode steps that the request adds: (m-1)·µ, µ = d1 + d2·L, L = n + m/2."""
        context = request.input_tokens + request.output_tokens / 2
        return (request.output_tokens - 1) * (self.profile.d1 + self.profile.d2 * context)

    def least_steps(self, request: WorkloadRequest) -> tuple[float, float, float]:
        """Return the request's share of the fewest decode steps, by three limits of a step.

        Each sum over requests is a lower limit of the number of steps that decode them: steps last at most
        S_D on average, (m-1)·µ/(S_D - t0); the KV cache holds every context, (m-1)·L/capacity; and a step
        decodes at most max_seqs requests, (m-1)/max_seqs.
        """
        decodes = request.output_tokens - 1
        slack_s = self.slo.tpot_s - self.profile.t0
        context = request.input_tokens + request.output_tokens / 2
        return (
            self.decode_work_s(request) / slack_s if slack_s > 0 else float("inf") if decodes else 0.0,
            decodes * context / self.profile.kv_capacity_tokens,
            decodes / self.profile.max_seqs,
        )

    def decode_demands_s(self, request: WorkloadRequest) -> tuple[float, float, float]:
        """Return the decode work with the request's share of t0, one value for each limit of a step."""
        work_s = self.decode_work_s(request)
        by_slo, by_cache, by_batch = self.least_steps(request)
        t0 = self.profile.t0
        return work_s + t0 * by_slo, work_s + t0 * by_cache, work_s + t0 * by_batch
