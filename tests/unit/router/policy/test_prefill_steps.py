"""The steps of an engine: their tokens are learned, and the time of an answer is predicted from them."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from fulcrum_core.latency import PrefillModel
from fulcrum_router.policy.ledger import Ledger, PrefillEntry
from fulcrum_router.policy.prefill_steps import WINDOW, Bounds

MODEL = PrefillModel(c0=0.02, c1=1e-4, c2=0.0)
BUDGET = 1_000
FULL_S = 0.12
"""Time of a step of 1,000 tokens."""


class Engine:
    """Computes at most `BUDGET` prompt tokens a step, in the order of arrival."""

    def __init__(self) -> None:
        self.ledger, self.now_s = Ledger(), 0.0
        self._waiting: list[list[PrefillEntry | int]] = []

    def send(self, *prompts: int) -> None:
        for tokens in prompts:
            entry = self.ledger.add_prefill(tokens=tokens, predicted_s=MODEL.ttft_s(tokens), now_s=self.now_s)
            self._waiting.append([entry, tokens])

    def step(self, *arriving: int) -> None:
        """Compute one step, in which others arrive; the prompts that it completes are answered at its end."""
        budget, answered = BUDGET, []
        for prompt in self._waiting:
            entry, left = prompt
            assert isinstance(entry, PrefillEntry)
            assert isinstance(left, int)
            chunk = min(left, budget)
            budget, prompt[1] = budget - chunk, left - chunk
            if chunk == left:
                answered.append(entry)
        self._waiting = [prompt for prompt in self._waiting if prompt[1]]
        self.send(*arriving)
        self.now_s += MODEL.c0 + MODEL.c1 * (BUDGET - budget)
        for entry in answered:
            entry.release(self.now_s)

    def run_until_idle(self) -> None:
        while self._waiting:
            self.step()


def learn_steps(prompts: Sequence[int]) -> Engine:
    """An engine that has computed these prompts, which were sent together while it computed another one."""
    engine = Engine()
    engine.send(50)
    engine.step(*prompts)
    engine.run_until_idle()
    return engine


SHORT = [random.Random(7).randint(50, 500) for _ in range(200)]


@pytest.mark.parametrize(
    ("queue", "steps_before", "answer_s"),
    [
        pytest.param([400, 400], 0, 0.10 + 0.03, id="behind a step that is not full"),
        pytest.param([300] * 4, 0, 2 * FULL_S, id="with the rest of a prompt, in a step that fills up"),
        pytest.param([250] * 8, 0, 3 * FULL_S, id="behind two full steps"),
        pytest.param([250] * 10, 1, 2 * FULL_S, id="behind one full step that has just begun"),
        pytest.param([600] * 5, 1, 3 * FULL_S, id="a prompt that has begun counts as far as it is left"),
        pytest.param([], 0, 0.03, id="an idle engine"),
    ],
)
def test_a_prompt_is_answered_at_the_end_of_its_step(
    queue: list[int], steps_before: int, answer_s: float
) -> None:
    engine = learn_steps(SHORT)
    engine.send(50)
    engine.step(*queue)
    for _ in range(steps_before):
        engine.step()
    predicted_s = engine.ledger.predict_answer_s(MODEL, 100, engine.now_s)
    assert predicted_s == pytest.approx(answer_s, abs=0.004)


def test_time_passes_within_a_step_and_an_engine_that_hangs_does_not_look_idle() -> None:
    engine = learn_steps(SHORT)
    engine.send(50)
    engine.step(*[250] * 8)
    times = (0.06, FULL_S, FULL_S + 0.06, 99.0)
    found = [engine.ledger.predict_answer_s(MODEL, 100, engine.now_s + s) for s in times]
    assert found == pytest.approx([0.3, 0.24, 0.3, 0.36], abs=0.004)


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([], id="nothing was computed"),
        pytest.param([900] * 50, id="prompts about as long as a step"),
        pytest.param([2_500] * 50, id="prompts longer than a step"),
    ],
)
def test_without_steps_of_several_prompts_their_own_times_are_added_up(prompts: list[int]) -> None:
    engine = learn_steps(prompts)
    engine.send(500, 500)
    assert engine.ledger.predict_answer_s(MODEL, 100, engine.now_s) == pytest.approx(2 * 0.07 + 0.03)


def test_the_value_that_most_bounds_allow_is_found() -> None:
    bounds = Bounds()
    for pair in [(1.0, 9.0), (4.0, 6.0), (5.0, 12.0), (20.0, 30.0)]:
        bounds.add(*pair)
    assert bounds.find_most_covered() == 5.5


def find_among(pairs: Sequence[tuple[float, float]]) -> float:
    """The same of all pairs at once."""
    ends = sorted([(low, 1) for low, _ in pairs] + [(high, -1) for _, high in pairs])
    covered = most = 0
    best = 0.0
    for (value, change), (following, _) in pairwise(ends):
        covered += change
        if covered > most:
            most, best = covered, (value + following) / 2
    return best


def test_bounds_that_are_kept_in_order_give_the_same_as_sorted_ones(seed: int) -> None:
    rng, bounds, pairs = random.Random(seed), Bounds(), list[tuple[float, float]]()
    for _ in range(4 * WINDOW):
        low = rng.choice([rng.uniform(-10, 50), float(rng.randrange(6))])
        pairs.append((low, low + rng.choice([0.0, 1.0, rng.uniform(0, 9)])))
        bounds.add(*pairs[-1])
        assert bounds.find_most_covered() == find_among(pairs[-WINDOW:])
