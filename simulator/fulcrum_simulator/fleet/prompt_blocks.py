"""The beginnings of simulated prompts: for the engines' prefix caches, and for the router's index of them.

A recorded workload has an id for each block of a prompt. The router's index compares these ids. An engine
model compares its own, smaller blocks: their hashes follow from the ids. `run` makes one where prefix caches
are simulated, and `router` asks it for each request.
"""

from collections.abc import Sequence
from functools import lru_cache

from fulcrum_core.errors import InvalidInput
from fulcrum_router.policy.prefix_index import PromptPrefix
from fulcrum_simulator.workload import WorkloadRequest, find_block_tokens


class PromptBlocks:
    """The blocks of all prompts of a workload.

    Raises:
        InvalidInput: if the workload has no block ids, or they do not fit the engine's blocks.
    """

    def __init__(self, workload: Sequence[WorkloadRequest], *, engine_block_tokens: int) -> None:
        self._tokens = tokens = find_block_tokens(workload)
        if tokens % engine_block_tokens:
            rule = f"must be a multiple of the engine's blocks of {engine_block_tokens} tokens"
            raise InvalidInput("workload", f"blocks of {tokens} tokens", rule)
        self._engine_tokens, self._per_id = engine_block_tokens, tokens // engine_block_tokens
        longest = max(len(request.prefix_hash_ids) for request in workload)
        self._ends = range(tokens, tokens * (longest + 1), tokens)
        self._hash_parts = lru_cache(maxsize=1 << 16)(self._make_hashes)

    def build_prefix(self, request: WorkloadRequest) -> PromptPrefix:
        """The full blocks of a prompt for the router's index."""
        full = request.input_tokens // self._tokens
        return PromptPrefix([number + 1 for number in request.prefix_hash_ids[:full]], self._ends)

    def build_hashes(self, request: WorkloadRequest) -> tuple[bytes, ...]:
        """The hashes of the engine's full blocks."""
        hashes: list[bytes] = []
        for number in request.prefix_hash_ids:
            hashes += self._hash_parts(number)
        return tuple(hashes[: request.input_tokens // self._engine_tokens])

    def _make_hashes(self, number: int) -> list[bytes]:
        return [b"%d.%d" % (number, part) for part in range(self._per_id)]
