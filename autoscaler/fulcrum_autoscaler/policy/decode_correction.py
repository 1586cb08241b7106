"""Corrects the forecast of decode by the tokens that are in decode. Used by `balanced`.

The forecast multiplies arrivals by predicted output lengths. When a new kind of request arrives, nobody knows
how long its answers are, and the prediction may be far too short. The KV tokens in decode show that sooner
than the first complete answers do: they exceed E, what the arrivals so far should have led to,

    dE/dt = (a·I - E) / τ

with a the token steps that arrive in a second, I the inter-token latency and τ the mean time of an answer in
decode. E starts with the tokens in decode. The ratio of both is the factor by which arrivals bring more
decode work than predicted. It is at least 1: too long a prediction only gives decode some more room.
"""

import math
from dataclasses import dataclass, replace

from fulcrum_autoscaler.policy.forecast import Rates

FACTOR_MAX = 3.0
"""Largest factor: more has another cause than the length of answers."""
LIGHT_SHARE = 0.2
"""Share of the tokens that decode can hold within its objective, below which its tokens show nothing."""


@dataclass(frozen=True, slots=True)
class DecodeCorrection:
    """The correction after one tick."""

    expected_tokens: float | None = None
    """KV tokens that the arrivals so far should have led to; None: no tick was made."""
    factor: float = 1.0
    """Decode work that arrives, as a multiple of the predicted one."""

    def follow(
        self, tokens: float, rates: Rates, *, itl_s: float, seconds: float, room_tokens: float
    ) -> "DecodeCorrection":
        """Return the correction after another tick.

        Args:
            tokens: KV tokens in decode now.
            rates: What arrives, as predicted.
            itl_s: Inter-token latency now.
            seconds: Time since the last tick.
            room_tokens: KV tokens that decode can hold within its objective.
        """
        if self.expected_tokens is None or not rates.requests:
            return DecodeCorrection(tokens)
        answer_s = itl_s * rates.output_tokens / rates.requests
        left = math.exp(-seconds / answer_s) if answer_s else 0.0
        expected = rates.token_steps * itl_s * (1 - left) + self.expected_tokens * left
        least = LIGHT_SHARE * room_tokens
        if not math.isfinite(expected) or not 0 < least < math.inf:
            return DecodeCorrection(tokens)
        factor = max(tokens, least) / max(expected, least)
        return DecodeCorrection(expected, min(FACTOR_MAX, max(1.0, factor)))

    def correct(self, rates: Rates) -> Rates:
        """Multiply the decode work of the rates by the factor."""
        return replace(
            rates,
            output_tokens=self.factor * rates.output_tokens,
            token_steps=self.factor * rates.token_steps,
        )


NO_CORRECTION = DecodeCorrection()
"""No tick was made."""
