"""The KV cache as a pool of counted blocks, with a prefix cache over those that nobody holds.

A block keeps what was written to it until it is written again, whoever owns it: a peer that reads a block
after its lease ran out gets the right KV as long as nobody took the block, and another prompt's afterwards.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from fulcrum_core.errors import InvalidInput


class Prompt(NamedTuple):
    """What tells the KV cache of a prompt apart: the digest of it all, chained hashes of its full blocks."""

    digest: bytes
    hashes: tuple[bytes, ...]

    def hash_at(self, index: int) -> bytes | None:
        """The hash of the `index`-th block; None for a partial block and for blocks of output."""
        return self.hashes[index] if 0 <= index < len(self.hashes) else None


class _Content(NamedTuple):
    """What a block holds: the block at `position` of a prompt and its output."""

    prompt: Prompt
    position: int


_UNWRITTEN = _Content(Prompt(bytes(16), ()), 0)


class BlockPool:
    """`size` blocks. Free ones are taken least recently used first, so that cached prefixes live long."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self._holders = [0] * size
        self._content = [_UNWRITTEN] * size
        self._cached: dict[bytes, int] = {}
        self._key: list[bytes | None] = [None] * size

    @property
    def available(self) -> int:
        """Blocks that nobody holds, cached or not."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many requests and leases hold this block."""
        return self._holders[block]

    def find_prefix(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """The cached blocks of the longest known prefix, at most `most` of them. Nothing is held yet."""
        found = []
        for key in hashes[:most]:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, prefix: Sequence[int], fresh: int) -> bool:
        """Whether `fresh` blocks can be taken besides holding `prefix`."""
        return fresh <= len(self._free) - sum(not self._holders[block] for block in prefix)

    def hold(self, blocks: Sequence[int]) -> None:
        """Count one more holder of each."""
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1

    def take(self, count: int, prompt: Prompt, first_index: int) -> list[int]:
        """`count` free blocks for the prompt's blocks from `first_index` on. Only where they fit."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for index, block in enumerate(taken, first_index):
            self._forget(block)
            self._holders[block] = 1
            self._content[block] = _Content(prompt, index)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Count one holder less of each. A prompt's tail is reused before its head, which others share."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def remember(self, prompt: Prompt, blocks: Sequence[int], first_index: int) -> None:
        """Enter computed, full blocks into the prefix cache, as far as the prompt has hashes for them."""
        for key, block in zip(prompt.hashes[first_index:], blocks, strict=False):
            if key not in self._cached:
                self._cached[key] = block
                self._key[block] = key

    def overwrite(self, blocks: Sequence[int], prompt: Prompt, first_index: int) -> None:
        """Note that these held blocks were written with another prompt's KV than they were taken for."""
        for index, block in enumerate(blocks, first_index):
            self._content[block] = _Content(prompt, index)

    def foreign_digest(self, prompt: Prompt, blocks: Sequence[int]) -> bytes | None:
        """The digest of whose KV lies in a prompt's leading `blocks` in place of its own; else None."""
        return next(
            (
                found
                for i, block in enumerate(blocks)
                if (found := self._digest_at(block, prompt, i)) != prompt.digest
            ),
            None,
        )

    def read(self, blocks: Sequence[int]) -> tuple[bytes, ...]:
        """Per block the digest of the prompt that it holds; the last block tells whose tail is being read.

        A block that another prompt wrote, but with the same prefix, counts as the prompt's own.
        InvalidInput for a block that does not exist.
        """
        for block in blocks:
            if not 0 <= block < self.size:
                raise InvalidInput("block_ids", block, f"is not one of the {self.size} KV blocks")
        if not blocks:
            return ()
        prompt, last_index = self._content[blocks[-1]]
        first_index = last_index - len(blocks) + 1
        return tuple(self._digest_at(block, prompt, index) for index, block in enumerate(blocks, first_index))

    def _digest_at(self, block: int, prompt: Prompt, index: int) -> bytes:
        """The prompt's digest if the block holds its `index`-th block, else that of what it holds."""
        held, position = self._content[block]
        if position == index:
            key = prompt.hash_at(index)
            if held.digest == prompt.digest or (key is not None and held.hash_at(index) == key):
                return prompt.digest
        if held.digest == prompt.digest:
            return prompt.digest[::-1]  # the right prompt in the wrong place reads as nobody's
        return held.digest

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._cached[key]
            self._key[block] = None
