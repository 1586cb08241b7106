"""The deadline of a whole response: one that is not streamed, so that the engine sends it at its end.

Until then nothing arrives that shows whether the engine works on it. So the deadline moves on while the
engine's count of computed tokens grows (`observe.engines` reads it), up to a limit for the output tokens. The
legs compute their deadlines with it, and `upstream` enforces these.
"""

SECONDS_PER_TOKEN = 0.5
"""Time allowed for each output token: several times as long as a slow engine takes."""


def compute_max_response_s(*, first_byte_timeout_s: float, max_output_tokens: int) -> float:
    """Compute the longest time for a whole response of so many output tokens."""
    return first_byte_timeout_s + max_output_tokens * SECONDS_PER_TOKEN


def compute_deadline_s(
    *, sent_s: float, progress_at_s: float, first_byte_timeout_s: float, max_response_s: float
) -> float:
    """Compute until when to wait for a whole response, on the clock of `sent_s` and `progress_at_s`.

        min(sent + max_response_s, max(sent, progress) + F)

    F is the time-out of the first byte. So the response fails when its engine has made no progress for F, or
    when the response takes longer than `max_response_s`.
    """
    return min(sent_s + max_response_s, max(sent_s, progress_at_s) + first_byte_timeout_s)
