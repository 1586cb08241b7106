"""Take out of a recorded workload the prompt tokens that an unlimited prefix cache would save.

`fulcrum bounds` does so with `--prefix-cache`: a bound must hold for engines that have such a cache, too.
Prefix caches of limited size are part of the engine model.
"""

from collections.abc import Sequence
from dataclasses import replace

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.workload.requests import WorkloadRequest


def leave_out_prefix_hits(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Return the requests with prompts shortened by the leading blocks that an earlier prompt had.

    Every engine has the blocks of every earlier prompt at no cost. At least one token is left to compute.

    Raises:
        InvalidInput: if the workload has no block ids, or no block size fits all prompts.
    """
    block_tokens = find_block_tokens(requests)
    seen: set[int] = set()
    shortened = []
    for request in requests:
        hits = next(
            (index for index, block in enumerate(request.prefix_hash_ids) if block not in seen),
            len(request.prefix_hash_ids),
        )
        seen.update(request.prefix_hash_ids)
        left = max(1, request.input_tokens - hits * block_tokens)
        shortened.append(replace(request, input_tokens=left))
    return shortened


def find_block_tokens(requests: Sequence[WorkloadRequest]) -> int:
    """Return the tokens of a block: with it, every prompt has ceil(tokens / block) block ids.

    Of several such sizes a power of 2, as engines use them; else the largest.

    Raises:
        InvalidInput: if there are no block ids, or no size fits all prompts.
    """
    marked = [request for request in requests if request.prefix_hash_ids]
    if not marked:
        raise InvalidInput("workload", "no block ids", "must have them to count prefix hits")
    lengths = [(request.input_tokens, len(request.prefix_hash_ids)) for request in marked]
    least = max(-(-tokens // blocks) for tokens, blocks in lengths)
    most = min(((tokens - 1) // (blocks - 1) for tokens, blocks in lengths if blocks > 1), default=least)
    if least > most:
        raise InvalidInput("workload", f"blocks of {most} to {least} tokens", "must have blocks of one size")
    power = 1 << (most.bit_length() - 1)
    return power if power >= least else most
