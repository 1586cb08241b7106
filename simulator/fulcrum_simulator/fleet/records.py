"""What happened to each request of a run. Times are seconds from the start of the run, at the client.

`run` makes a record for each request, and `router` fills it; `report`, `timeline` and the live page's states
read it.
"""

from fulcrum_core.values import Slo
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import WorkloadRequest


class RequestResult:
    """One request of the workload; the router fills in the rest."""

    __slots__ = (
        "cached_tokens",
        "decode",
        "first_token_s",
        "last_token_s",
        "outcome",
        "output_tokens",
        "prefill",
        "prefill_end_s",
        "prefill_queue_s",
        "prefill_sent_s",
        "request",
        "retry_after_s",
    )

    def __init__(self, request: WorkloadRequest) -> None:
        self.request = request
        self.outcome: Outcome | None = None
        """None: it still ran when the run ended."""
        self.output_tokens = request.output_tokens
        """Of its answer; fewer than it asked for if admission limited them."""
        self.retry_after_s = 0
        """Seconds after which a refused request may be sent again."""
        self.prefill = self.decode = ""
        """Names of the instances that served the two legs last."""
        self.cached_tokens = 0
        """Prompt tokens that its prefill instance had in its prefix cache."""
        self.prefill_sent_s = 0.0
        self.prefill_queue_s = 0.0
        """Time that the prompt waited in the engine."""
        self.prefill_end_s: float | None = None
        """When the router had the response of the prefill leg."""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        """None: the response is not complete."""

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token at the client, sent by the decode instance; None: there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, as the client observes it; None with a single token."""
        return self._mean_gap_s(self.first_token_s)

    @property
    def arrow_ttft_s(self) -> float | None:
        """TTFT by the Arrow paper, where the prefill emits the first token at its end; None: not reached."""
        end_s = self.first_token_s if self.prefill_end_s is None else self.prefill_end_s
        return None if end_s is None else end_s - self.request.arrival_s

    @property
    def arrow_tpot_s(self) -> float | None:
        """TPOT by the Arrow paper, with KV transfer and decode queue as parts; None with a single token."""
        return self._mean_gap_s(self.first_token_s if self.prefill_end_s is None else self.prefill_end_s)

    def meets(self, slo: Slo) -> bool:
        """Whether the request succeeded and met both objectives, as the client observes them."""
        return self._meets(slo, self.ttft_s, self.tpot_s)

    def meets_by_arrow(self, slo: Slo) -> bool:
        """Whether the request succeeded and met both objectives by the definitions of the Arrow paper."""
        return self._meets(slo, self.arrow_ttft_s, self.arrow_tpot_s)

    def _meets(self, slo: Slo, ttft_s: float | None, tpot_s: float | None) -> bool:
        return self.outcome is Outcome.OK and ttft_s is not None and slo.is_met(ttft_s=ttft_s, tpot_s=tpot_s)

    def _mean_gap_s(self, first_s: float | None) -> float | None:
        gaps = self.output_tokens - 1
        if first_s is None or self.last_token_s is None or not gaps:
            return None
        return (self.last_token_s - first_s) / gaps
