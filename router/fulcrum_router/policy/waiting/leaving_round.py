"""One round of a waiting room: the order in which its requests are asked whether they can leave now.

`WaitingRoom` begins a round when an instance may take work again, asks the request that `choose` returns, and
reports the answer, until no request is left to ask. The round remembers what need not be asked again: the row
of a request that found no instance, since the others of the row would find none either (`block`), and the
line of a tenant whose next request waits for room in decode or for a reserve (`set_aside`). Such lines are
left out until the round ends, so that others of their level come to their turn. Each round also finds anew
which lines wait for decode (`Level.held`).
"""

from collections.abc import Collection, Mapping, Sequence

from fulcrum_router.policy.waiting.level import Level
from fulcrum_router.policy.waiting.line import Line, RowKey, WaitingRequest

MAX_LATE = 50
"""Requests that become late in a round before their deadline, at most: each asks all instances twice."""
MAX_HELD_LINES = 16
"""Tenants of one tier that are held before its others are not asked: asking 10,000 would stop the router."""


class LeavingRound:
    """One round. It begins with the first request that it chooses, and ends with `end`."""

    __slots__ = ("_blocked", "_full", "_held_before", "_held_lines", "_late_left", "_set_aside")

    def __init__(self) -> None:
        self._blocked: set[RowKey] = set()
        """Rows of which no request can leave now."""
        self._late_left = MAX_LATE
        """How many more requests may become late before their deadline."""
        self._set_aside: list[tuple[Level, Line]] = []
        self._held_lines: dict[tuple[Level, str], int] = {}
        """How many lines of a tier were asked and held."""
        self._held_before: dict[Level, dict[Line, None]] = {}
        """Lines of the levels that were asked, as they were held before the round."""
        self._full: dict[Level, set[str]] = {}
        """Tiers of a level with so many held lines that no more of them are asked."""

    @property
    def only_deflected(self) -> bool:
        """Whether a late request waits for any prefill instance, and only deflected ones may pass it."""
        return (True, None) in self._blocked

    def count_late(self) -> bool:
        """Count a request that became late; False: the round ends, and the next one goes on."""
        self._late_left -= 1
        return self._late_left > 0

    def choose(self, levels: Sequence[Level], departed_s: float) -> WaitingRequest | None:
        """Choose the request to ask next; None: nobody else can leave.

        It is of the highest level, except that lower levels that are due go first, the longest due before
        the others.

        Args:
            levels: All levels, by descending priority.
            departed_s: Prefill work of all requests that have left for an instance, in seconds.
        """
        level = _choose_level(levels, departed_s, self._full, self._blocked)
        line = None if level is None else level.find_first(self._full.get(level, ()), self._blocked)
        request = None if line is None else line.find_next(self._blocked)
        if level is None or request is None:
            for other in levels:
                if other not in self._held_before:
                    other.held = {}  # whoever waits there is blocked, and not by decode
            return None
        if level not in self._held_before:
            self._held_before[level], level.held = level.held, {}
        return request

    def block(self, row: RowKey) -> None:
        """No instance takes a request of this row: ask no other one of it."""
        self._blocked.add(row)

    def set_aside(self, level: Level, line: Line) -> None:
        """Ask the line no more in this round; after `MAX_HELD_LINES` lines of a tier, nor the rest of it."""
        line.is_aside = True
        self._set_aside.append((level, line))
        key = level, line.tier
        self._held_lines[key] = self._held_lines.get(key, 0) + 1
        if self._held_lines[key] == MAX_HELD_LINES:
            level.hold_further(self._held_before[level], line.tier)
            self._full.setdefault(level, set()).add(line.tier)

    def end(self) -> None:
        """Put the lines that were set aside back into the order of their levels."""
        for level, line in self._set_aside:
            if level.lines.get(line.key) is line:
                level.enqueue(line)


def _choose_level(
    levels: Sequence[Level],
    departed_s: float,
    passed_over: Mapping[Level, Collection[str]],
    blocked: Collection[RowKey],
) -> Level | None:
    """The level whose turn is next, of `levels` by descending priority; None if no request waits.

    Of the lower levels that are due, the one that has been due for longest. `passed_over` names tiers of a
    level that are not asked, `blocked` rows.
    """
    highest = due = None
    for level in levels:
        if level.find_first(passed_over.get(level, ()), blocked) is None:
            continue
        if highest is None:
            highest = level
        elif level.due_at_s <= departed_s and (due is None or level.due_at_s < due.due_at_s):
            due = level
    return due or highest
