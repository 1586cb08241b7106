"""Turn the responses of one prefill instance into samples of its prefill time, also while prompts queue.

An engine computes prompts in the order of arrival. So the time of the oldest prompt counts from the previous
response, or from its own arrival if nothing was in flight. Its time in the queue is thus not included.

The last step of a prompt often also computes the beginning of the next prompt: measured alone, the first
seems too slow and the second too fast. So a sample joins all prompts until the engine has none left, at most
those of `RESPONSES_MAX` responses. Prompts that one step completes are answered together and count as one
response. A prompt that overtook the oldest one is added to the oldest one's response. Prompt tokens from the
prefix cache do not count: they were not computed. `learning` adds each response of a prefill leg, and fits
the model with the samples.
"""

from typing import NamedTuple

from fulcrum_router.policy.prefill_steps import TOGETHER_S

RESPONSES_MAX = 8
"""Most responses in a sample: then the steps that it shares with its neighbours hardly matter."""


class PrefillSample(NamedTuple):
    """Prompts that an instance computed one after another or together, and the time it took."""

    tokens: int
    """Computed tokens: Σ (n − cached)."""
    squares: int
    """Token pairs of their attention: Σ (n² − cached²)."""
    duration_s: float
    responses: int = 1


class PrefillSampler:
    """Collects the responses of one instance."""

    __slots__ = ("_incomplete", "_overtaking_squares", "_overtaking_tokens")

    def __init__(self) -> None:
        self._incomplete: PrefillSample | None = None
        """The last sample, until it is known that no further response belongs to it."""
        self._overtaking_tokens = self._overtaking_squares = 0

    def add(
        self, *, tokens: int, cached_tokens: int, computed_for_s: float | None, more_in_flight: bool
    ) -> list[PrefillSample]:
        """Add the response for one prompt; returns the samples that are complete.

        Args:
            tokens: Tokens of the prompt.
            cached_tokens: Those from the prefix cache.
            computed_for_s: Time for which the prompt was the oldest in flight; None: an older one still is.
            more_in_flight: Whether the instance has other prompts.
        """
        cached_tokens = min(cached_tokens, tokens)
        computed = tokens - cached_tokens + self._overtaking_tokens
        squares = tokens**2 - cached_tokens**2 + self._overtaking_squares
        if computed_for_s is None:
            self._overtaking_tokens, self._overtaking_squares = computed, squares
            return []
        self._overtaking_tokens = self._overtaking_squares = 0
        incomplete, complete = self._incomplete, []
        together = computed_for_s < TOGETHER_S
        if incomplete is not None and incomplete.responses == RESPONSES_MAX and not together:
            complete.append(incomplete)
            incomplete = None
        sample = PrefillSample(computed, squares, computed_for_s)
        self._incomplete = sample if incomplete is None else _join(incomplete, sample, together=together)
        if not more_in_flight:
            complete.append(self._incomplete)
            self._incomplete = None
        return complete

    def clear(self) -> None:
        """Forget what is not complete: a leg failed, or the engine did other work meanwhile."""
        self._incomplete = None
        self._overtaking_tokens = self._overtaking_squares = 0


def _join(incomplete: PrefillSample, sample: PrefillSample, *, together: bool) -> PrefillSample:
    return PrefillSample(
        incomplete.tokens + sample.tokens,
        incomplete.squares + sample.squares,
        incomplete.duration_s + sample.duration_s,
        incomplete.responses + (not together),
    )
