"""The whole loop on virtual time: safe under faults, whole again after them, and worth its flips.

Every run prints its seed; `FULCRUM_SEED=n` repeats one.
"""

import os
import subprocess
import sys
from functools import cache
from statistics import mean

import pytest

from tests.paths import ROOT
from tests.simulation.checkers import LIVENESS, SAFETY, violations
from tests.simulation.plans import HEALED_S, STARTS_S, faulty, moving_mix, steady_load
from tests.simulation.world import Ended, simulate

faulty_world = cache(lambda seed: simulate(faulty(seed)))
moving_world = cache(lambda seed, mode: simulate(moving_mix(seed, mode)))


def seeds(count: int) -> list[int]:
    """Fixed ones, so that a failure is not chance; or the one asked for."""
    asked = os.environ.get("FULCRUM_SEED")
    return [int(asked)] if asked else list(range(1, count + 1))


@pytest.mark.parametrize("seed", seeds(6))
def test_faults_break_no_promise_and_leave_no_trace(seed: int) -> None:
    print(f"FULCRUM_SEED={seed}")
    ended = faulty_world(seed)
    assert violations(ended, *SAFETY, *LIVENESS) == []
    outcomes = {answer.outcome for answer in ended.answers}
    assert outcomes <= {"ok", "broken"}, "a request failed before its first token"
    assert ended.attainment(since_s=HEALED_S + 6) >= 0.95
    assert len(ended.flips(since_s=HEALED_S + 6)) <= 3, "roles do not converge"


def test_faults_do_happen() -> None:
    """The plans of the test above reach what they are meant to reach."""
    worlds = [faulty_world(seed) for seed in seeds(3)]
    kinds = {event.facts["fault"] for world in worlds for event in world.history.of("fault")}
    assert {"kill", "hang", "store away", "person flips", "autoscaler stalls"} <= kinds
    assert sum(world.lives[-1].life for world in worlds) > 0, "no engine was started twice"
    assert sum(len(world.flips()) for world in worlds) > 10


def test_auto_beats_off_on_a_moving_mix() -> None:
    off, auto = _both("Off"), _both("Auto")
    print("attainment Off", off, "Auto", auto)
    assert mean(auto) >= mean(off) + 0.10


def _both(mode: str) -> list[float]:
    return [_clean(moving_world(seed, mode)).attainment() for seed in seeds(2)]


def _clean(ended: Ended) -> Ended:
    assert violations(ended, *SAFETY, *LIVENESS) == []
    assert {answer.outcome for answer in ended.answers} == {"ok"}
    return ended


def test_a_moving_mix_is_followed_both_ways() -> None:
    flips = moving_world(seeds(1)[0], "Auto").flips()
    assert min(sum(flip["to"] == role for flip in flips) for role in ("Prefill", "Decode")) >= 2


@pytest.mark.parametrize("seed", seeds(2))
def test_a_steady_load_settles(seed: int) -> None:
    print(f"FULCRUM_SEED={seed}")
    ended = _clean(simulate(steady_load(seed)))
    assert len(ended.flips(since_s=STARTS_S + 10)) <= 1
    assert ended.attainment() >= 0.95


def test_off_and_advise_flip_nothing() -> None:
    for mode in ("Off", "Advise"):
        assert moving_world(seeds(1)[0], mode).flips() == []


def test_the_same_seed_gives_the_same_history_under_any_hash_seed() -> None:
    seed = seeds(1)[0]
    code = f"""if True:
        from tests.simulation.plans import faulty
        from tests.simulation.world import simulate
        print("digest", simulate(faulty({seed})).history.digest())
    """
    digests = {_output(code, hash_seed) for hash_seed in ("1", "2")}
    assert digests == {simulate(faulty(seed)).history.digest()}


def _output(code: str, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.rpartition("digest ")[2].strip()
