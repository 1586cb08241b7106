"""The steps in which one engine computes prompts, and when a prompt that is sent now would be answered.

An engine computes B prompt tokens in a step: the rest of one prompt, then whole ones, then the beginning of
another. Prompts that a step completes are answered together at its end. So with a queue a short prompt takes
as long as a whole step, and the time of a step does not count for its first prompt only. With steps of 0.7 s
and an objective of 3 s, a prediction that adds up the prompts' own times is wrong by 10 % either way.

B is learned from the steps that leave prompts which waited at their start: these steps are full.
Where a step answers one prompt, prompts are longer than a step, and the steps do not matter.

Each `Ledger` has one, and reports to it what was sent and answered.
"""

import math
from bisect import bisect_left, insort
from collections import deque

from fulcrum_core.latency import PrefillModel

TOGETHER_S = 0.003
"""Responses that are less than this apart come from one engine step: a step takes longer."""
MIN_PROMPTS = 1.5
"""Mean number of prompts that a step answers from which steps are used to predict."""
WINDOW = 64
"""Full steps from which B is learned."""
FULL_SHARE = 0.9
"""Share of B from which a step counts as full."""
RUN_STEPS = 16
"""Most steps that are counted together: the tokens of prompts are estimates."""


class Bounds:
    """The last `WINDOW` pairs of bounds of one value, and which value lies within most of them.

    The ends of all pairs are kept in order: a step ends 300 times a second, and sorting them takes 30 µs.
    """

    __slots__ = ("_ends", "_pairs")

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque()
        self._ends: list[tuple[float, int]] = []
        """Each low end with 1, each high end with -1."""

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, low: float, high: float) -> None:
        """Add a pair, and drop the oldest of more than `WINDOW`."""
        pairs, ends = self._pairs, self._ends
        if len(pairs) == WINDOW:
            oldest = pairs.popleft()
            del ends[bisect_left(ends, (oldest[0], 1))]
            del ends[bisect_left(ends, (oldest[1], -1))]
        pairs.append((low, high))
        insort(ends, (low, 1))
        insort(ends, (high, -1))

    def find_most_covered(self) -> float:
        """Return the middle of the values that lie within most of the pairs."""
        ends = self._ends
        covered = most = found = 0
        for position, (_, change) in enumerate(ends):
            covered += change
            if covered > most:
                most, found = covered, position
        return (ends[found][0] + ends[found + 1][0]) / 2 if most else 0.0


class PrefillSteps:
    """The step under way, and what full steps have answered. Times are seconds of the caller's clock."""

    __slots__ = (
        "_answered_s",
        "_begun_tokens",
        "_bounds",
        "_done_tokens",
        "_group_prompts",
        "_group_steps",
        "_group_tokens",
        "_mean_prompts",
        "_newest",
        "_newest_before",
        "_run_steps",
        "_run_tokens",
        "_size",
        "computed_tokens",
        "started_s",
        "tokens",
    )

    def __init__(self) -> None:
        self.started_s = 0.0
        """When the step under way began."""
        self.tokens = 0
        """Prompt tokens that were not computed when it began; it computes at most `size` of them."""
        self.computed_tokens = 0
        """Tokens of the oldest prompt in flight that earlier steps have computed."""
        self._answered_s = -math.inf
        """When the first prompt of the last group was answered: a group is what one step completes."""
        self._done_tokens = self._group_tokens = self._group_prompts = 0
        self._group_steps = 1
        """Steps until the group was answered: more than one if its first prompt is longer than a step."""
        self._run_steps = self._run_tokens = self._begun_tokens = 0
        """Full steps one after another, the tokens they answered, and those of a prompt begun before them."""
        self._newest = self._newest_before = -1
        """Number of the newest prompt at the start of the step under way, and of the one before."""
        self._bounds = Bounds()
        """Of B, by each of the last full steps."""
        self._size = self._mean_prompts = 0.0

    @property
    def size(self) -> float:
        """Tokens of a full step; 0: not known, or of no use."""
        return self._size if self._mean_prompts >= MIN_PROMPTS else 0.0

    def begin(self, number: int, tokens: int, now_s: float) -> None:
        """An idle engine got a prompt."""
        self.started_s, self.tokens, self.computed_tokens = now_s, tokens, 0
        self._newest, self._newest_before, self._group_prompts = number, -1, 0
        self._run_steps = self._run_tokens = self._begun_tokens = 0

    def answer(
        self, number: int, tokens: int, now_s: float, *, newest: int, left_tokens: int, next_tokens: int
    ) -> None:
        """The oldest prompt was answered.

        Args:
            number: Its number, in the order of arrival.
            tokens: Its tokens.
            now_s: The time.
            newest: Number of the newest prompt in flight.
            left_tokens: Tokens of the prompts that are left.
            next_tokens: Tokens of the oldest of them.
        """
        if now_s - self._answered_s >= TOGETHER_S:
            self._end_step(number, tokens, newest)
            self._answered_s = self.started_s = now_s
        self._group_prompts += 1
        self._group_tokens += tokens
        self._done_tokens -= tokens
        self.computed_tokens = max(0, min(self._done_tokens, next_tokens - 1))
        self.tokens = left_tokens - self.computed_tokens

    def _end_step(self, number: int, tokens: int, newest: int) -> None:
        """Another group begins. If this prompt was there when the step before began, that one was full."""
        if self._group_prompts and number <= self._newest_before:
            self._learn(tokens)
        else:
            self._run_steps = self._run_tokens = self._begun_tokens = 0
        self._newest_before, self._newest = self._newest, newest
        self._group_prompts = self._group_tokens = 0
        size = self.size
        self._group_steps = max(1, math.ceil((tokens - self.computed_tokens) / size)) if size else 1
        self._done_tokens = self.computed_tokens + int(min(self._group_steps * size, self.tokens))

    def _learn(self, next_tokens: int) -> None:
        """A full step has left a prompt of `next_tokens`: bound B by all full steps since one that was not.

        They have computed kB tokens: those answered, less what had been begun before, and a part of the next.
        """
        self._run_steps += self._group_steps
        self._run_tokens += self._group_tokens
        low = (self._run_tokens - self._begun_tokens) / self._run_steps
        self._bounds.add(low, (self._run_tokens + next_tokens) / self._run_steps)
        self._size = self._bounds.find_most_covered()
        self._mean_prompts += (self._group_prompts - self._mean_prompts) / len(self._bounds)
        if self._run_steps >= RUN_STEPS:
            self._run_steps = self._run_tokens = 0
            self._begun_tokens = next_tokens

    def predict_answer_s(
        self, model: PrefillModel, *, tokens: int, in_flight: int, squares: int, now_s: float
    ) -> float:
        """Predict the time until a prompt that is sent now is answered; `size` has to be known.

        A full step comes after another one, since others arrive meanwhile: T(B) each. The last step of a
        short queue has the tokens that are there.

        Args:
            model: T(n) of the engine.
            tokens: Of the prompt.
            in_flight: Tokens of the prompts in flight.
            squares: Σn² over these prompts of n tokens.
            now_s: The time.
        """
        size = self.size
        per_token_s = model.c1 + model.c2 * (squares + tokens**2) / max(1, in_flight + tokens)
        full_s = model.c0 + per_token_s * size
        present = min(self.tokens, size)
        present_s = model.c0 + per_token_s * present
        left_s = present_s - max(0.0, now_s - self.started_s)
        if left_s < 0.0:
            left_s = min(-left_s, present_s)  # overdue: as long again, as `Ledger.remaining_s` expects
        rest = max(0.0, in_flight - self.computed_tokens - present)
        behind = rest + tokens
        if behind <= size and (not rest or present < FULL_SHARE * size):
            return left_s + model.c0 + per_token_s * behind
        return left_s + full_s * math.ceil(behind / size)
