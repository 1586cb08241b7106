"""The deadline of a whole response: one that is not streamed, so that the engine sends it at its end.

Until then nothing arrives that shows whether the engine works on it. So the deadline moves on while the
engine's count of computed tokens grows (`observe.engines` reads it), up to a limit for the output tokens.
"""

SECONDS_PER_TOKEN = 0.5
"""Time allowed for each output token: several times as long as a slow engine takes."""
ASSUMED_CONTEXT_TOKENS = 131_072
"""Assumed longest context, for a request that leaves the number of output tokens to the engine."""


def compute_deadline_s(
    *, sent_s: float, progress_at_s: float, first_byte_timeout_s: float, max_output_tokens: int
) -> float:
    """Compute until when to wait for a whole response, on the clock of `sent_s` and `progress_at_s`.

        min(sent + F + n · SECONDS_PER_TOKEN, max(sent, progress) + F)

    F is the time-out of the first byte and n the number of output tokens that the request allows. So the
    response fails when its engine has made no progress for F, or when it takes too long for its tokens.
    """
    limit_at_s = sent_s + first_byte_timeout_s + max_output_tokens * SECONDS_PER_TOKEN
    return min(limit_at_s, max(sent_s, progress_at_s) + first_byte_timeout_s)
