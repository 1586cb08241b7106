"""The jobs of one busy period of a machine; finds the job without which the period ends earliest.

The jobs are kept in blocks. Each block knows its longest work and its shortest wait, so that a search reads
few jobs. `on_time` is the only caller.
"""

import math
from dataclasses import dataclass, field

_BLOCK_JOBS = 64


@dataclass(slots=True)
class _Block:
    works_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    shifted_s: float = 0.0
    """Part of every wait that has gone since it was written."""
    longest_work_s: float = 0.0
    shortest_wait_s: float = math.inf

    def append(self, work_s: float, wait_s: float) -> None:
        self.works_s.append(work_s)
        self.waits_s.append(wait_s + self.shifted_s)
        self.longest_work_s = max(self.longest_work_s, work_s)
        self.shortest_wait_s = min(self.shortest_wait_s, wait_s)

    def find_best(self, slack_s: float) -> tuple[float, int]:
        """Return the largest gain of a removal, and its index; `slack_s`: shortest wait after the block."""
        best_s, best = -1.0, 0
        for index in range(len(self.works_s) - 1, -1, -1):
            if min(self.works_s[index], slack_s) > best_s:
                best_s, best = min(self.works_s[index], slack_s), index
            slack_s = min(slack_s, self.waits_s[index] - self.shifted_s)
        return best_s, best

    def remove(self, index: int) -> float:
        """Remove a job and start those after it earlier; returns by how much the block ends earlier."""
        shift_s = self.works_s.pop(index)
        del self.waits_s[index]
        self.longest_work_s = max(self.works_s, default=0.0)
        return self._shift_each(shift_s, first=index)

    def shift(self, by_s: float) -> float:
        """Start all jobs `by_s` earlier, none before its release; returns by how much the last one is."""
        if by_s > self.shortest_wait_s:
            return self._shift_each(by_s, first=0)
        self.shifted_s += by_s
        self.shortest_wait_s -= by_s
        return by_s

    def _shift_each(self, by_s: float, *, first: int) -> float:
        waits_s = [wait_s - self.shifted_s for wait_s in self.waits_s]
        for index in range(first, len(waits_s)):
            by_s = min(by_s, waits_s[index])
            waits_s[index] -= by_s
        self.waits_s, self.shifted_s = waits_s, 0.0
        self.shortest_wait_s = min(waits_s, default=math.inf)
        return by_s


class BusyPeriod:
    """Jobs that run one after the other without a pause, each with the time for which it waited."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def clear(self) -> None:
        """Begin a new busy period."""
        self._blocks.clear()

    def append(self, work_s: float, wait_s: float) -> None:
        """Add the newest job, which starts `wait_s` after its release."""
        if not self._blocks or len(self._blocks[-1].works_s) >= _BLOCK_JOBS:
            self._blocks.append(_Block())
        self._blocks[-1].append(work_s, wait_s)

    def remove_one(self) -> float:
        """Remove the job without which the newest ends first; returns by how many seconds.

        The gain is the removed work or the shortest wait of the jobs after it, whichever is less: none of
        them starts before its release.
        """
        place, index, gain_s = self._find_best()
        shift_s = self._blocks[place].remove(index)
        for block in self._blocks[place + 1 :]:
            shift_s = block.shift(shift_s)
        return gain_s

    def _find_best(self) -> tuple[int, int, float]:
        slack_s, place, index, gain_s = math.inf, 0, 0, -1.0
        for candidate in range(len(self._blocks) - 1, -1, -1):
            block = self._blocks[candidate]
            if min(block.longest_work_s, slack_s) > gain_s:
                best_s, best = block.find_best(slack_s)
                if best_s > gain_s:
                    place, index, gain_s = candidate, best, best_s
            slack_s = min(slack_s, block.shortest_wait_s)
            if slack_s <= gain_s:
                break
        return place, index, gain_s
