"""How long a prompt may take that a decode instance computes between the tokens of its answers.

The router deflects no longer ones (`fulcrum_router.policy.deflection` has the reasons); the autoscaler counts
on deflection only where the mean prompt is short enough.
"""

STALL_MAX = 15.0
"""Longest stall, in TPOT objectives. With 100 ms it is 1.5 s, a prompt of 16,000 tokens on four H100."""
STALL_SHARE = 0.25
"""Share of the spare time of a mean answer that stalls may take: half of the answers are shorter."""
BATCH_FULL = 0.8
"""Share of the TPOT objective that decode with all stalls may use; the rest is for wrong predictions."""


def find_longest_stall_s(*, tpot_s: float, output_tokens: float) -> float:
    """Return the longest time in seconds of a prompt beside answers of `output_tokens` tokens in the mean.

    It is allowed if the decodes have nothing else to do; busy ones can spare less.
    """
    return min(STALL_MAX * tpot_s, STALL_SHARE * output_tokens * BATCH_FULL * tpot_s)
