"""The comparison of engine profiles with steps that were measured on a GPU."""

from dataclasses import asdict

import pytest

from bench.gpu_profiles import (
    COEFFICIENTS,
    compute_all_reduce_s,
    compute_deviations,
    find_attention_s,
    fit_curves,
    read_curves,
)
from fulcrum_core.latency import StepModel

BUDGET, LINK = 8192, (1e11, 1e-5)
TRUTH = StepModel(t0=0.01, b=2e-5, c=5e-10, d1=1e-5, d2=5e-8, mixed_factor=1.2)


def measure(gpus: int, *, without_s: float = 0.0) -> dict[str, object]:
    """The curves of an engine with exactly these coefficients; each step was `without_s` shorter."""
    chunks = {n: [(done, min(BUDGET, n - done)) for done in range(0, n, BUDGET)] for n in (512, 4096, 16384)}
    return {
        "shape": {"gpus": gpus, "layers": 10, "hidden": 1000},
        "prefill": [(n, [TRUTH.step_s([c], []) - without_s for c in parts]) for n, parts in chunks.items()],
        "decode": [(b, n, TRUTH.step_s([], [n] * b) - without_s) for b in (1, 8, 64) for n in (100, 1000)],
        "mixed": [(n, TRUTH.step_s([(0, n)], [100]) - TRUTH.step_s([], [100])) for n in (128, 1024)],
    }


def test_a_profile_with_the_measured_coefficients_does_not_deviate() -> None:
    deviations = compute_deviations(TRUTH, read_curves(measure(1), BUDGET, LINK), BUDGET)
    assert [round(value, 9) for values in deviations.values() for value in values] == [0.0] * 11


def test_the_fit_finds_the_coefficients() -> None:
    fitted = fit_curves(read_curves(measure(1), BUDGET, LINK), BUDGET).steps
    assert {name: getattr(fitted, name) for name in COEFFICIENTS} == pytest.approx(asdict(TRUTH), rel=1e-6)


def test_attention_is_found_from_two_chunks_of_one_prompt() -> None:
    assert find_attention_s(measure(1), BUDGET) == pytest.approx(TRUTH.c)


def test_all_reduce_is_added_to_the_part_of_one_gpu() -> None:
    shape = {"gpus": 4, "layers": 10, "hidden": 1000}
    one_step_s = compute_all_reduce_s(shape, 64, LINK)
    assert one_step_s == pytest.approx(20 * (1e-5 + 2 * 1000 * 64 * 1.5 / 1e11))
    (_, seconds) = read_curves(measure(4, without_s=one_step_s), BUDGET, LINK)["decode"][-1]
    assert seconds == pytest.approx(TRUTH.step_s([], [1000] * 64))
