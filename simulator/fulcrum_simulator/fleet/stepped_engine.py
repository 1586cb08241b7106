"""An engine model with the steps that it is in: executes a step only if something happens in it.

Between two such steps lie identical decode steps, which are skipped together. The result is the same, bit for
bit, as with `lookahead_steps` of 1, which executes every step. `instance` has one for each engine process.
"""

import math
from bisect import bisect_right

from fulcrum_simulator.engine import Engine, EngineEvent

LOOKAHEAD_STEPS = 128
"""Most steps planned ahead: a request that arrives makes the rest of the plan void."""
SHORT_PLAN_STEPS = 8
"""After a plan that became void, the next one may have twice the steps that were used of it, at least this
many. A plan that was used to its end doubles the limit of the next one.
"""


class SteppedEngine:
    """The caller starts a step and finishes it at `due_s`.

    Before any other call that changes the engine's work: `advance`, then `truncate`. Before one that reads
    its state: `advance`, then `apply`.
    """

    def __init__(self, engine: Engine, *, lookahead_steps: int = LOOKAHEAD_STEPS) -> None:
        self.engine = engine
        self._prefill_busy_s = self._decode_busy_s = 0.0
        """Time of steps with a prompt chunk, and of all others, until the one under way has ended."""
        self._has_prompt = False
        """Whether the step under way has a prompt chunk."""
        self.next_end_s = math.inf
        """Time of the next end of a step that `advance` passes on; before it there is nothing to do."""
        self._lookahead_steps = self._planned_steps = lookahead_steps
        """Most steps of any plan, and of the next one."""
        self._ends_s: list[float] = []
        self._passed = 0
        """Steps whose tokens `advance` has passed on."""
        self._applied = 0
        """Those of them that the engine has skipped: it does so together with later ones."""
        self._request_ids: list[str] = []

    @property
    def due_s(self) -> float:
        """Time at which `finish` is to be called."""
        return self._ends_s[-1]

    def start(self, now_s: float) -> bool:
        """Start the next step; False if there is nothing to compute."""
        step = self.engine.start_step(now_s)
        if step is None:
            return False
        self._ends_s, self._request_ids = self.engine.plan_decode_run(
            now_s, step, steps_max=self._planned_steps
        )
        self._passed = self._applied = 0
        self.next_end_s = self._ends_s[0] if len(self._ends_s) > 1 else math.inf
        self._has_prompt = step.prefill_tokens > 0
        if self._has_prompt:
            self._prefill_busy_s += step.duration_s
        else:
            self._decode_busy_s += step.duration_s
        return True

    def measure_busy_s(self, now_s: float) -> tuple[float, float]:
        """Return the time of steps with a prompt chunk, and of all others, so far. Call `advance` first."""
        left_s = max(0.0, self._ends_s[self._passed] - now_s) if self.engine.busy else 0.0
        if self._has_prompt:
            return self._prefill_busy_s - left_s, self._decode_busy_s
        return self._prefill_busy_s, self._decode_busy_s - left_s

    def advance(self, now_s: float) -> tuple[list[str], int]:
        """Pass on the steps that have ended by now: returns the requests, and how many tokens each got.

        The engine's own state follows with `apply`: with many instances most steps are passed on one by one,
        while the engine skips many together.
        """
        if now_s < self.next_end_s:
            return self._request_ids, 0
        ends_s, passed = self._ends_s, self._passed
        last, until = len(ends_s) - 1, passed + 1
        if until < last and ends_s[until] <= now_s:
            until = bisect_right(ends_s, now_s, until, last)
        self._decode_busy_s += ends_s[until] - ends_s[passed]
        self._passed = until
        self.next_end_s = ends_s[until] if until < last else math.inf
        return self._request_ids, until - passed

    def apply(self) -> None:
        """Bring the engine's state to the last `advance`."""
        if self._applied < self._passed:
            self.engine.skip_steps(self._ends_s[self._applied : self._passed])
            self._applied = self._passed

    def truncate(self) -> bool:
        """Let the step under way be the last one planned; True if `due_s` has changed."""
        self.apply()
        left = len(self._ends_s) - self._passed
        if left > 1:
            self._planned_steps = min(self._lookahead_steps, max(SHORT_PLAN_STEPS, 2 * (self._passed + 1)))
        self._ends_s = self._ends_s[self._passed : self._passed + 1]
        self._passed = self._applied = 0
        self.next_end_s = math.inf
        return left > 1

    def finish(self) -> tuple[list[EngineEvent], list[str]]:
        """End the last planned step at `due_s`; returns its events and the requests that went on decoding.

        Call `advance` for that time first.
        """
        self.apply()
        if len(self._ends_s) == self._planned_steps:
            self._planned_steps = min(self._lookahead_steps, 2 * self._planned_steps)
        continued: list[str] = []
        return self.engine.finish_step(self.due_s, continued=continued), continued
