"""Which instance has which beginnings of prompts in its prefix cache, by what was sent where.

A prompt is divided into blocks, and each block's hash includes all before it (`PromptPrefix`). The index
keeps no text, only hashes. Their places form sets of eight, as in the cache of a processor: four for blocks
that were seen once and four for blocks that were used again. A new block takes the least recently used of its
four places. A client that sends prompts that nobody repeats can therefore push out only blocks of the first
kind.

An engine evicts what it used least recently, too. So that the index needs no eviction events, each instance
has a horizon: what was last used before it, counts as evicted. The horizon moves

    with new KV         as soon as the engine has written as much since then as it has room for
    to a missing block  if the engine reports fewer cached tokens than were predicted

If its engine was restarted or its cache salt rotated, the instance begins anew, as if it was another one.

An instance that has never reported a cached token has no hits: its engine may not report any, or has no
prefix cache, and hits that nothing confirms would only bend the load. Journeys ask for hits before dispatch
and record what they send and what engines report (`journey.record`).
"""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

DEFAULT_BLOCKS = 1 << 18
"""Blocks of the index: 6 MiB with up to 63 instances, and as much as about 200 instances cache."""
_WAYS = 8
"""Blocks of one set: the first half is for those that were seen once."""
_NEW_WAYS = _WAYS // 2
_USED, _MASK = _WAYS, 2 * _WAYS
_SET = 3 * _WAYS
"""Numbers of one set: a key for each block, then when each was used, then who has it. They lie next to each
other, so that a lookup reads one place of the memory and not three."""
_BITS = 63
"""Instances in one number."""
_MARKS = 64
"""Points in time that are remembered of an instance, to find what it has evicted."""
_REMEMBERED_MASKS = 1024
"""Sets of instances whose names are remembered."""
_TOLERANCE_TOKENS = 128
"""Cached tokens that a report may lack: templates add tokens, and blocks of engines have other ends."""
_TOLERANCE_SHARE = 0.1
"""Share of the predicted tokens that it may lack: tokens are estimated by bytes."""


class PromptPrefix(NamedTuple):
    """The beginning of a prompt in blocks."""

    hashes: Sequence[int] = ()
    """One hash for each block, from -2**63 to 2**63 - 1; it includes the blocks before."""
    ends: Sequence[int] = ()
    """Where the blocks end, in any unit, ascending; may be longer than `hashes`."""
    tokens_per_unit: float = 1.0

    def count_tokens(self, blocks: int) -> int:
        """Return the tokens of the first `blocks` blocks."""
        return int(self.ends[blocks - 1] * self.tokens_per_unit) if blocks else 0


NO_PREFIX = PromptPrefix()
"""The prompt is not in the index: it is short, or has no bytes to compare."""


class Hits(NamedTuple):
    """What the instances are predicted to have of one prompt."""

    tokens: Mapping[str, int]
    """Tokens by instance; instances without any are left out."""
    used: Sequence[int]
    """When each of the found blocks was last used."""
    places: Sequence[int]
    """Where the index has them."""


NO_HITS = Hits({}, (), ())
"""No instance is known to have a part of the prompt."""


class _Holder:
    """One instance in the index."""

    __slots__ = ("bit", "horizon", "marks", "name", "reports", "written")

    def __init__(self, name: str, bit: int, *, reports: bool) -> None:
        self.name, self.bit = name, bit
        self.reports = reports
        """Whether the engine has ever reported a cached token."""
        self.horizon = 0
        """What was last used before it is not there any more."""
        self.written = 0.0
        """Tokens whose KV the engine has written."""
        self.marks: deque[tuple[int, float]] = deque()
        """Times, and the tokens written until then."""

    def write(self, tokens: float, room_tokens: float, now: int) -> int:
        """Count new KV: what is older than the last `room_tokens` of it is evicted. Returns the horizon."""
        marks, written = self.marks, self.written + tokens
        self.written = written
        if not marks or written - marks[-1][1] >= room_tokens / _MARKS:
            marks.append((now, written))
        while len(marks) > 1 and written - marks[0][1] > room_tokens:
            self.horizon = max(self.horizon, marks.popleft()[0])
        return self.horizon


class PrefixIndex:
    """The prefix caches of all instances, as far as they follow from what was sent.

    `blocks` are a power of 2.
    """

    def __init__(self, blocks: int = DEFAULT_BLOCKS) -> None:
        self._last_set = blocks // _WAYS - 1
        self._table = array("q", bytes(8 * 3 * blocks))
        """The sets. The place of a block is that of its key; `_USED` and `_MASK` numbers after it are when it
        was last used, and a bit for each instance that has it."""
        self._further: list[array[int]] = []
        """Bits of further instances for each block (`_number`)."""
        self._now = 1
        """Prompts that were recorded; times are counted in them."""
        self._holders: dict[str, _Holder] = {}
        self._free_bits, self._left_bits = list(range(_BITS)), list[int]()
        """Bits that no block has; and those of former instances, which blocks still have."""
        self._names: dict[int, tuple[str, ...]] = {}
        """Names of the instances in a mask that report cached tokens."""
        self._last_horizon = 0
        """The latest horizon of all instances."""
        self.predicted_tokens = self.reported_tokens = 0
        """Cached tokens of all answered prefill legs, as predicted and as their engines reported them."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the blocks, in bytes."""
        return 8 * (len(self._table) + sum(map(len, self._further)))

    def find_hits(self, prefix: PromptPrefix) -> Hits:
        """Return the tokens of a prompt that each instance is predicted to have in its cache."""
        table, last_set = self._table, self._last_set
        find, places = table.index, list[int]()
        try:
            for key in prefix.hashes:
                start = (key & last_set) * _SET
                places.append(find(key, start, start + _WAYS))
        except ValueError:  # a block that nobody has
            pass
        if not places:
            return NO_HITS
        used, tokens = [table[at + _USED] for at in places], dict[str, int]()
        masks = [table[at + _MASK] for at in places]
        if self._further:
            masks = list(map(self._read_mask, places))
        left = masks[0]
        if masks.count(left) == len(masks):  # the usual case: the same instances have all blocks
            self._add_tokens(tokens, prefix, left, used)
        else:
            for depth, mask in enumerate(masks):
                if left & ~mask:
                    self._add_tokens(tokens, prefix, left & ~mask, used[:depth])
                    left &= mask
            self._add_tokens(tokens, prefix, left, used)
        return Hits(tokens, used, places)

    def _add_tokens(
        self, tokens: dict[str, int], prefix: PromptPrefix, mask: int, used: Sequence[int]
    ) -> None:
        """Add the instances in `mask`, which have the blocks that were used at these times."""
        names = self._names.get(mask)
        if names is None:
            names = self._list_names(mask)
        if used[-1] >= self._last_horizon:
            tokens.update(dict.fromkeys(names, prefix.count_tokens(len(used))))
        else:
            self._add_present(tokens, prefix, names, used)

    def _read_mask(self, at: int) -> int:
        mask, block = self._table[at + _MASK], _number(at)
        return mask + sum(word[block] << _BITS * number for number, word in enumerate(self._further, 1))

    def _list_names(self, mask: int) -> tuple[str, ...]:
        """Return the names of the instances in a mask that report cached tokens, and remember them."""
        if len(self._names) >= _REMEMBERED_MASKS:
            self._names.clear()
        present = (h for h in self._holders.values() if h.reports and mask >> h.bit & 1)
        self._names[mask] = names = tuple(holder.name for holder in present)
        return names

    def _add_present(
        self, tokens: dict[str, int], prefix: PromptPrefix, names: Sequence[str], used: Sequence[int]
    ) -> None:
        """Add the blocks that were used after the horizon of their instance; the first ones are newest."""
        for name in names:
            horizon, depth = self._holders[name].horizon, len(used)
            while depth and used[depth - 1] < horizon:
                depth -= 1
            if depth:
                tokens[name] = prefix.count_tokens(depth)

    def record(
        self,
        prefix: PromptPrefix,
        name: str,
        *,
        new_tokens: float,
        room_tokens: float,
        places: Sequence[int] = (),
    ) -> None:
        """A prompt is sent to an instance, which then has it in its cache.

        Args:
            prefix: The prompt.
            name: The instance.
            new_tokens: Tokens that its engine writes for the request.
            room_tokens: Tokens of KV that the engine has room for besides that of running requests.
            places: Where the first blocks were found.
        """
        self._now = now = self._now + 1
        holder = self._holders.get(name)
        if holder is None:
            holder = self._add_holder(name, reports=False)
        self._last_horizon = max(self._last_horizon, holder.write(new_tokens, room_tokens, now))
        table, word, bit = self._table, holder.bit // _BITS, 1 << holder.bit % _BITS
        found = len(places)
        for depth, key in enumerate(prefix.hashes):
            at = places[depth] if depth < found else -1
            if at < 0 or table[at] != key:
                at = self._find_or_add(key)  # it was not found, or has moved since
            if not at & _NEW_WAYS and table[at + _USED]:
                at = self._promote(at)
            table[at + _USED] = now
            if word:
                self._further[word - 1][_number(at)] |= bit
            else:
                table[at + _MASK] |= bit

    def _find_or_add(self, key: int) -> int:
        """Return the place of a block; a new one takes that of the least recently used new one of its set."""
        table, start = self._table, (key & self._last_set) * _SET
        try:
            return table.index(key, start, start + _WAYS)
        except ValueError:
            used = table[start + _USED : start + _USED + _NEW_WAYS]
        at = start + used.index(min(used))
        table[at], table[at + _USED], table[at + _MASK] = key, 0, 0
        for word in self._further:
            word[_number(at)] = 0
        return at

    def report(self, name: str, hits: Hits, prefix: PromptPrefix, *, cached_tokens: int) -> None:
        """The engine of an instance reports how many tokens of a prompt it had in its cache."""
        holder = self._holders.get(name)
        if holder is None:
            return
        predicted = hits.tokens.get(name, 0)
        self.predicted_tokens += predicted
        self.reported_tokens += cached_tokens
        if cached_tokens and not holder.reports:
            holder.reports = True
            self._names.clear()
        if predicted <= cached_tokens + _TOLERANCE_TOKENS + _TOLERANCE_SHARE * predicted:
            return
        missing = next(d for d in range(len(hits.used)) if prefix.count_tokens(d + 1) > cached_tokens)
        holder.horizon = max(holder.horizon, hits.used[missing] + 1)
        self._last_horizon = max(self._last_horizon, holder.horizon)

    def forget(self, name: str) -> None:
        """The engine of an instance has lost its cache, or may not use it any more."""
        holder = self._holders.get(name)
        if holder is not None:
            self._remove(name)
            self._add_holder(name, reports=holder.reports)

    def keep_only(self, names: Iterable[str]) -> None:
        """Remove all other instances."""
        for name in self._holders.keys() - set(names):
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._left_bits.append(self._holders.pop(name).bit)
        self._names.clear()

    def _add_holder(self, name: str, *, reports: bool) -> _Holder:
        if not self._free_bits and self._left_bits:
            self._clear_left_bits()
        elif not self._free_bits:
            self._further.append(array("q", bytes(8 * (self._last_set + 1) * _WAYS)))
            self._free_bits = list(range(_BITS * len(self._further), _BITS * (len(self._further) + 1)))
        holder = self._holders[name] = _Holder(name, self._free_bits.pop(), reports=reports)
        self._names.clear()
        return holder

    def _clear_left_bits(self) -> None:
        """Clear the bits of former instances in all blocks: once for about 60 of them, as it takes 30 ms."""
        masks = [0] * (1 + len(self._further))
        for bit in self._left_bits:
            masks[bit // _BITS] |= 1 << bit % _BITS
        table, mask = self._table, ~masks[0]
        for start in range(_MASK, len(table), _SET):
            for at in range(start, start + _WAYS):
                table[at] &= mask
        for word, left in zip(self._further, masks[1:], strict=True):
            for number, had in enumerate(word):
                word[number] = had & ~left
        self._free_bits, self._left_bits = self._left_bits, []

    def _promote(self, at: int) -> int:
        """Move a block that is used again; it changes places with the least recently used of those."""
        table, first = self._table, (at & -_WAYS) + _NEW_WAYS
        used = table[first + _USED : first + _USED + _NEW_WAYS]
        to = first + used.index(min(used))
        for offset in (0, _USED, _MASK):
            table[at + offset], table[to + offset] = table[to + offset], table[at + offset]
        for word in self._further:
            one, other = _number(at), _number(to)
            word[one], word[other] = word[other], word[one]
        return to


def _number(at: int) -> int:
    """The number of the block at a place."""
    return at // _SET * _WAYS + at % _WAYS
