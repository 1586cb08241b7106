"""Overflow: CPU instances compute prompts that accelerators would compute too late.

A CPU instance beside accelerators gets no work by the usual rules: it computes a prompt ten to forty times as
slowly, and a prompt that is sent cannot be taken back. It takes one when it arrives, if

    long, or of a lower tier       more than `LONG_PROMPT_TOKENS`, or a tier below the highest
    the accelerators are late      the best of them would miss the TTFT objective, behind the work in front
    decode has room                some decode instance passes the check of dispatch with it
    the CPUs are in time           the prompt and at most `CPU_QUEUE_MAX_S` of other work, in 0.8 of the time

So a prompt that accelerators compute in time stays there, and waits for less work than without the CPUs. The
share of prompts that goes to CPUs says how much prefill the accelerators lack: `PromptCounts`.

`journey.eligible` asks when a request arrives. Decode and service without accelerators use CPU instances by
the usual rules.
"""

from collections.abc import Collection, Sequence

from fulcrum_router.policy.candidates import V
from fulcrum_router.policy.work import Work

LONG_PROMPT_TOKENS = 5_000
"""Prompts of the highest tier from which CPUs take them: a short prompt frees little."""
CPU_QUEUE_MAX_S = 0.5
"""Work up to which a CPU instance takes a prompt: accelerators may be free again before it has computed a
queue."""
IN_TIME_SHARE = 0.8
"""Share of the time left in which a CPU must end a prompt; the rest is for wrong predictions."""


class PromptCounts:
    """Prompts that were sent to be computed, and those of them that CPUs got beside accelerators."""

    __slots__ = ("overflow_prompts", "overflow_tokens", "prompts", "tokens")

    def __init__(self) -> None:
        self.prompts = self.tokens = self.overflow_prompts = self.overflow_tokens = 0

    def record(self, tokens: int) -> None:
        """Count a prompt, wherever it goes."""
        self.prompts += 1
        self.tokens += tokens

    def record_overflow(self, tokens: int) -> None:
        """Count a prompt that goes to CPU instances, besides."""
        self.overflow_prompts += 1
        self.overflow_tokens += tokens


def choose_overflow(
    instances: Sequence[V],
    work: Work,
    *,
    now_s: float,
    ends_at_s: float,
    start_s: float,
    is_lower_tier: bool,
    exclude: Collection[str] = (),
) -> V | None:
    """Choose the CPU instance that ends the prompt first; None: accelerators compute it.

    Args:
        instances: The CPU instances.
        work: The request.
        now_s: Time on the monotonic clock.
        ends_at_s: When accelerators would end the prompt.
        start_s: Time from the end of the prompt to the first token.
        is_lower_tier: Whether there is a higher tier.
        exclude: Names of instances that must not get the request.
    """
    due_s = work.deadline_s - start_s
    if ends_at_s <= due_s or not (is_lower_tier or work.prompt_tokens > LONG_PROMPT_TOKENS):
        return None
    by_s = now_s + IN_TIME_SHARE * (due_s - now_s)
    best: tuple[float, str, V] | None = None
    for instance in instances:
        left_s = instance.ledger.remaining_s(now_s)
        if left_s > CPU_QUEUE_MAX_S or instance.name in exclude:
            continue
        end_s = now_s + left_s + instance.prefill_model.ttft_s(work.count_computed(instance.name))
        if end_s <= by_s and (best is None or (end_s, instance.name) < best[:2]):
            best = end_s, instance.name, instance
    return None if best is None else best[2]
