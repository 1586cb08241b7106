"""The KV cache as a pool of counted blocks, with a prefix cache over those that nobody holds.

A block keeps what was written to it until it is written again, whoever owns it: a peer that reads a block
after its lease ran out gets the right KV as long as nobody took the block, and another prompt's afterwards.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from fulcrum_core.errors import InvalidInput


class PromptKey(NamedTuple):
    """What tells the KV cache of a prompt apart: the digest of it all, chained hashes of its full blocks."""

    digest: bytes
    hashes: tuple[bytes, ...]

    def hash_at(self, index: int) -> bytes | None:
        """The hash of the `index`-th block; None for a partial block and for blocks of output."""
        return self.hashes[index] if 0 <= index < len(self.hashes) else None


_NO_PROMPT = PromptKey(bytes(16), ())


class BlockPool:
    """`size` blocks. Blocks outside the prefix cache are taken first, then those unused for longest."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free_uncached = deque(range(size))  # free, and not in the prefix cache
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # free, but in the prefix cache
        self._reference_counts = [0] * size
        self._written_by = [_NO_PROMPT] * size  # whose KV a block holds, and which block of it
        self._block_index = [0] * size
        self._cached: dict[bytes, int] = {}
        self._cache_key: list[bytes | None] = [None] * size

    @property
    def available(self) -> int:
        """Blocks that nobody holds, cached or not."""
        return len(self._free_uncached) + len(self._free_cached)

    def reference_count(self, block: int) -> int:
        """How many requests and leases hold this block."""
        return self._reference_counts[block]

    def find_prefix(self, hashes: Sequence[bytes], blocks_max: int) -> list[int]:
        """The cached blocks of the longest known prefix, at most `blocks_max` of them. Nothing is held
        yet."""
        found = []
        for key in hashes[:blocks_max]:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, prefix: Sequence[int], count: int) -> bool:
        """Whether `count` blocks can be taken besides holding `prefix`."""
        return count <= self.available - sum(not self._reference_counts[block] for block in prefix)

    def add_reference(self, blocks: Sequence[int]) -> None:
        """Count one more holder of each of these cached blocks."""
        for block in blocks:
            if not self._reference_counts[block]:
                del self._free_cached[block]
            self._reference_counts[block] += 1

    def allocate(self, count: int, prompt: PromptKey, first_index: int) -> list[int]:
        """`count` free blocks for the prompt's blocks from `first_index` on. Only where they fit."""
        uncached = min(count, len(self._free_uncached))
        allocated = [self._free_uncached.popleft() for _ in range(uncached)]
        allocated += [self._evict() for _ in range(count - uncached)]
        for block in allocated:
            self._reference_counts[block] = 1
        self.mark_written(allocated, prompt, first_index)
        return allocated

    def release(self, blocks: Sequence[int]) -> None:
        """Count one holder less of each. A prompt's tail is reused before its head, which others share."""
        for block in reversed(blocks):
            self._reference_counts[block] -= 1
            if not self._reference_counts[block]:
                if self._cache_key[block] is None:
                    self._free_uncached.append(block)
                else:
                    self._free_cached[block] = None

    def add_to_cache(self, prompt: PromptKey, blocks: Sequence[int], first_index: int) -> None:
        """Enter computed, full blocks into the prefix cache, as far as the prompt has hashes for them."""
        for key, block in zip(prompt.hashes[first_index:], blocks, strict=False):
            if key not in self._cached:
                self._cached[key] = block
                self._cache_key[block] = key

    def mark_written(self, blocks: Sequence[int], prompt: PromptKey, first_index: int) -> None:
        """Note whose KV is written to these held blocks."""
        for index, block in enumerate(blocks, first_index):
            self._written_by[block] = prompt
            self._block_index[block] = index

    def find_foreign_digest(self, prompt: PromptKey, blocks: Sequence[int]) -> bytes | None:
        """The digest of whose KV lies in a prompt's leading `blocks` in place of its own; else None."""
        held = (self._digest_at(block, prompt, index) for index, block in enumerate(blocks))
        return next((digest for digest in held if digest != prompt.digest), None)

    def read(self, blocks: Sequence[int]) -> tuple[bytes, ...]:
        """Per block the digest of the prompt that it holds; the last block tells whose tail is being read.

        A block that another prompt wrote, but with the same prefix, counts as the prompt's own. InvalidInput
        for a block that does not exist.
        """
        if not blocks:
            return ()
        for block in (min(blocks), max(blocks)):
            if not 0 <= block < self.size:
                raise InvalidInput("block_ids", block, f"is not one of the {self.size} KV blocks")
        prompt = self._written_by[blocks[-1]]
        first_index = self._block_index[blocks[-1]] - len(blocks) + 1
        return tuple(
            [self._digest_at(block, prompt, index) for index, block in enumerate(blocks, first_index)]
        )

    def _digest_at(self, block: int, prompt: PromptKey, index: int) -> bytes:
        """The prompt's digest if the block holds its `index`-th block, else that of what it holds."""
        held = self._written_by[block]
        if self._block_index[block] == index:
            if held is prompt or held.digest == prompt.digest:
                return prompt.digest
            key = prompt.hash_at(index)
            if key is not None and held.hash_at(index) == key:
                return prompt.digest
        if held.digest == prompt.digest:
            return prompt.digest[::-1]  # the right prompt in the wrong place reads as nobody's
        return held.digest

    def _evict(self) -> int:
        """The block of the least recently used prefix, forgotten by the cache."""
        block, _ = self._free_cached.popitem(last=False)
        key = self._cache_key[block]
        assert key is not None, "only cached blocks are idle"
        del self._cached[key]
        self._cache_key[block] = None
        return block
