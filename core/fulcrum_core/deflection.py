"""How long prompts may stall the answers of a decode instance that computes them in between.

The router deflects no others (`fulcrum_router.policy.deflection` has the reasons); the autoscaler counts on
deflection only where the mean prompt is short enough.
"""

STALL_MAX = 30.0
"""Longest stall, in TPOT objectives. With 100 ms it is 3 s, a prompt of 30,000 tokens on four H100; an engine
computes it in steps of its token budget, and its answers get a token with each."""
STALL_SHARE = 0.25
"""Share of the time of a mean answer that stalls may take: half of the answers are shorter."""
MIXED_FACTOR = 1.1
"""Time of a prompt among decodes, as a multiple of its time alone (Splitwise)."""
TPOT_SHARE = 0.8
"""Share of the TPOT objective that decode with all stalls may use; the rest is for wrong predictions."""


def find_stalls_max_s(*, tpot_s: float, output_tokens: float) -> float:
    """Return how many seconds all stalls of an answer of `output_tokens` tokens may take."""
    return STALL_SHARE * output_tokens * TPOT_SHARE * tpot_s


def find_longest_prompt_s(*, tpot_s: float, output_tokens: float) -> float:
    """Return how long a prompt may be beside answers of `output_tokens` tokens in the mean.

    That is its time when it is computed alone, in seconds, if the decodes have time to spare and nothing to
    catch up with; others can bear less.
    """
    longest_s = min(STALL_MAX * tpot_s, find_stalls_max_s(tpot_s=tpot_s, output_tokens=output_tokens))
    return longest_s / MIXED_FACTOR
