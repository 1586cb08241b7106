"""The KV cache of a simulated engine: reference-counted blocks and a prefix cache. `engine` uses it.

A running request or a lease of the engine holds references to its blocks. A block of the prefix cache is
evicted only when it has no references.

A block keeps its contents until it is written again. A decode instance that pulls a block after its lease
expired gets the right KV until the block is reused, and another prompt's KV from then on.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from fulcrum_core.errors import InvalidInput


class PromptKey(NamedTuple):
    """Identifies the KV cache of a prompt: the digest of the whole prompt, and the chained hashes of its full
    blocks.
    """

    digest: bytes
    hashes: tuple[bytes, ...]

    def hash_at(self, index: int) -> bytes | None:
        """Return the hash of the `index`-th block; None for a partial block and for blocks of output."""
        return self.hashes[index] if 0 <= index < len(self.hashes) else None


_NO_PROMPT = PromptKey(bytes(16), ())


@lru_cache(maxsize=8)
def _list_numbers(size: int) -> tuple[int, ...]:
    """List the numbers below `size`; pools of one size share them, which halves their memory."""
    return tuple(range(size))


class _BlockQueue:
    """Blocks, first in, first out; many at a time in one step."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self._blocks = list(blocks)
        self._start = 0  # blocks before it were taken

    def __len__(self) -> int:
        return len(self._blocks) - self._start

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks[self._start :])

    def put(self, blocks: Sequence[int]) -> None:
        self._blocks += blocks

    def take(self, count: int) -> list[int]:
        """Take the first `count` blocks, or all if there are fewer."""
        taken = self._blocks[self._start : self._start + count]
        self._start += len(taken)
        if self._start > len(self):  # at most half of the list is unused
            del self._blocks[: self._start]
            self._start = 0
        return taken


class BlockPool:
    """A pool of `size` blocks. A block is free if it has no references.

    Free blocks outside the prefix cache are allocated first, then the least recently used cached ones. Only
    blocks of the prefix cache are shared: any other block has one reference or none, and no count.

    With `tracks_contents` it knows whose KV each block holds. Without, allocation takes less time, no block
    holds a foreign prompt, and `read` must not be called.
    """

    def __init__(self, size: int, *, tracks_contents: bool = True) -> None:
        self.size = size
        self._tracks_contents = tracks_contents
        self._free_uncached = _BlockQueue(_list_numbers(size))  # free, and not in the prefix cache
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # free, but in the prefix cache
        self._reference_counts: dict[int, int] = {}  # of blocks in the prefix cache
        tracked = size if tracks_contents else 0
        self._written_by = [_NO_PROMPT] * tracked  # prompt whose KV a block holds; its block index is below
        self._block_index = [0] * tracked
        self._cached: dict[bytes, int] = {}
        self._cache_key: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Number of free blocks, in the prefix cache or not."""
        return len(self._free_uncached) + len(self._free_cached)

    def reference_count(self, block: int) -> int:
        """Return the number of requests and leases that hold this block."""
        if block in self._cache_key:
            return self._reference_counts[block]
        return int(block not in self._free_uncached)

    def find_prefix(self, hashes: Sequence[bytes], blocks_max: int) -> list[int]:
        """Return the blocks of the longest cached prefix, at most `blocks_max`, without adding references."""
        found = []
        for key in hashes[:blocks_max]:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, prefix: Sequence[int], count: int) -> bool:
        """Whether `count` blocks would still be free after `add_reference(prefix)`."""
        return count <= self.available - sum(not self._reference_counts[block] for block in prefix)

    def add_reference(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these cached blocks."""
        for block in blocks:
            if not self._reference_counts[block]:
                del self._free_cached[block]
            self._reference_counts[block] += 1

    def allocate(self, count: int, prompt: PromptKey, first_index: int) -> list[int]:
        """Allocate `count` blocks for the prompt's blocks from `first_index` on.

        The caller checks `can_allocate` first.
        """
        allocated = self._free_uncached.take(count)
        allocated += [self._evict() for _ in range(count - len(allocated))]
        self.mark_written(allocated, prompt, first_index)
        return allocated

    def allocate_next(self, places: Sequence[tuple[PromptKey, int]]) -> list[int]:
        """Allocate one block for each prompt's block index, as one `allocate` after the other does."""
        allocated = self._free_uncached.take(len(places))
        allocated += [self._evict() for _ in range(len(places) - len(allocated))]
        if self._tracks_contents:
            for block, (prompt, index) in zip(allocated, places, strict=True):
                self._written_by[block], self._block_index[block] = prompt, index
        return allocated

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block.

        A prompt's last blocks are reused first; its first ones may be a shared prefix.
        """
        if not self._cached:
            self._free_uncached.put(blocks[::-1])
            return
        uncached = []
        for block in reversed(blocks):
            if block not in self._cache_key:
                uncached.append(block)
                continue
            self._reference_counts[block] -= 1
            if not self._reference_counts[block]:
                self._free_cached[block] = None
        self._free_uncached.put(uncached)

    def add_to_cache(self, prompt: PromptKey, blocks: Sequence[int], first_index: int) -> None:
        """Add computed, full blocks to the prefix cache, as far as the prompt has hashes for them."""
        for key, block in zip(prompt.hashes[first_index:], blocks, strict=False):
            if key not in self._cached:
                self._cached[key] = block
                self._cache_key[block] = key
                self._reference_counts[block] = 1

    def mark_written(self, blocks: Sequence[int], prompt: PromptKey, first_index: int) -> None:
        """Record that the KV of this prompt is written to these blocks."""
        if not self._tracks_contents:
            return
        written_by, block_index = self._written_by, self._block_index
        for index, block in enumerate(blocks, first_index):
            written_by[block], block_index[block] = prompt, index

    def find_foreign_digest(self, prompt: PromptKey, blocks: Sequence[int]) -> bytes | None:
        """Return the digest of the first other prompt whose KV is in `blocks`; None if all are this prompt's.

        A block of this prompt at the wrong index counts as another prompt's.
        """
        if not self._tracks_contents:
            return None
        held = (self._digest_at(block, prompt, index) for index, block in enumerate(blocks))
        return next((digest for digest in held if digest != prompt.digest), None)

    def read(self, blocks: Sequence[int]) -> tuple[bytes, ...]:
        """Return for each block the digest of the prompt whose KV it holds.

        The reader does not name the prompt that it expects: the prompt that wrote the last block is taken for
        it, with its blocks in sequence up to that one. An earlier block that another prompt with the same
        prefix wrote has the expected prompt's digest. If the last block was reused by such a prompt, the KV
        is right, but reads as that prompt's; on a real engine the text would be right.

        Raises:
            InvalidInput: if a block does not exist.
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
        """Return the prompt's digest if the block holds the prompt's `index`-th block, else another digest.

        That is the digest of the prompt whose KV the block holds; for another block of the same prompt, the
        reversed digest, which belongs to no prompt.
        """
        held = self._written_by[block]
        if self._block_index[block] == index:
            if held is prompt or held.digest == prompt.digest:
                return prompt.digest
            key = prompt.hash_at(index)
            if key is not None and held.hash_at(index) == key:
                return prompt.digest
        if held.digest == prompt.digest:
            return prompt.digest[::-1]
        return held.digest

    def _evict(self) -> int:
        """Remove the least recently used block from the prefix cache and return it."""
        block, _ = self._free_cached.popitem(last=False)
        del self._cached[self._cache_key.pop(block)]
        del self._reference_counts[block]
        return block
