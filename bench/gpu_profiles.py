"""Compares engine profiles with the steps that `bench/gpu_steps.py` measured on a GPU.

    python bench/gpu_profiles.py [FILE]

Prints how far the profile's predictions are from each curve, mean and range, and the coefficients that
`fulcrum profile` would fit to the curves. Of a model on several GPUs one GPU's part was measured, without
the all-reduce after each attention and MLP: it is added, with an assumed rate and least duration, and the
deviations are printed with slower and faster ones, too. FILE is by default `gpu_steps_h100.json`, one run
on an H100. Exit code 1 if a curve cannot be fitted within 10 %, the limit of `fulcrum profile`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from fulcrum_core.latency import StepModel
from fulcrum_core.profiles import load_profile
from fulcrum_simulator.profiling.fit import FittedProfile, fit_profile
from fulcrum_simulator.profiling.samples import DecodeMeasurement, MixedMeasurement, PrefillMeasurement

MEASURED = Path(__file__).with_name("gpu_steps_h100.json")
MAPE_MAX = 0.10
AllReduce = tuple[float, float]
"""Bytes a second, and the least duration in seconds, of an all-reduce over the GPUs of a node."""
ALL_REDUCE: AllReduce = 3.6e11, 8e-6
"""Assumed for NVLink 4."""
OTHER_ALL_REDUCE: tuple[AllReduce, ...] = ((2.4e11, 8e-6), (4.8e11, 5e-6))
BYTES_PER_VALUE, ALL_REDUCES_PER_LAYER = 2, 2
MIXED_BATCH, MIXED_CONTEXT = 128, 1024
"""Requests that decode beside a chunk, and the tokens of each, as in `gpu_steps`."""
COEFFICIENTS = ("t0", "b", "c", "d1", "d2", "mixed_factor")

Curves = dict[str, list[tuple[Any, float]]]
"""Sizes and seconds of the points of each curve."""


def compute_all_reduce_s(shape: dict[str, Any], tokens: int, link: AllReduce) -> float:
    """Estimate the seconds that a step of `tokens` spends on all-reduce (ring)."""
    gpus = shape["gpus"]
    if gpus == 1:
        return 0.0
    moved = BYTES_PER_VALUE * shape["hidden"] * tokens * 2 * (gpus - 1) / gpus
    return float(ALL_REDUCES_PER_LAYER * shape["layers"] * (link[1] + moved / link[0]))


def read_curves(measured: dict[str, Any], token_budget: int, link: AllReduce) -> Curves:
    """Return the curves with all-reduce: (tokens,), (batch, context) or (chunk,), and the seconds."""
    shape = measured["shape"]

    def add_s(tokens: int) -> float:
        return compute_all_reduce_s(shape, tokens, link)

    prefill = []
    for tokens, chunks_s in measured["prefill"]:
        sizes = [min(token_budget, tokens - done) for done in range(0, tokens, token_budget)]
        seconds = sum(chunk_s + add_s(size) for size, chunk_s in zip(sizes, chunks_s, strict=True))
        prefill.append(((tokens,), seconds))
    return {
        "prefill": prefill,
        "decode": [((batch, n), seconds + add_s(batch)) for batch, n, seconds in measured["decode"]],
        "mixed": [((chunk,), seconds + add_s(chunk) - add_s(0)) for chunk, seconds in measured["mixed"]],
    }


def fit_curves(curves: Curves, token_budget: int) -> FittedProfile:
    """Fit the coefficients of a profile, as `fulcrum profile` does.

    Of mixed steps only what the chunk adds was kept: the rest is the decode step as fitted.
    """
    fit = partial(
        fit_profile,
        prefill=[PrefillMeasurement(tokens, seconds) for (tokens,), seconds in curves["prefill"]],
        decode=[DecodeMeasurement(batch, batch * n, seconds) for (batch, n), seconds in curves["decode"]],
        token_budget=token_budget,
    )
    decodes_s = fit(mixed=[]).steps.step_s((), [MIXED_CONTEXT] * MIXED_BATCH)
    return fit(
        mixed=[
            MixedMeasurement(chunk, decodes_s + seconds, MIXED_BATCH, MIXED_BATCH * MIXED_CONTEXT)
            for (chunk,), seconds in curves["mixed"]
        ]
    )


def compute_deviations(steps: StepModel, curves: Curves, token_budget: int) -> dict[str, list[float]]:
    """Return predicted / measured - 1 of each point of each curve: above 0, the prediction is too slow."""

    def prompt_s(tokens: int) -> float:
        return steps.b * tokens + steps.c * tokens**2

    predicted = {
        "prefill": [-(-n // token_budget) * steps.t0 + prompt_s(n) for (n,), _ in curves["prefill"]],
        "decode": [steps.step_s((), [n] * batch) for (batch, n), _ in curves["decode"]],
        "mixed": [steps.mixed_factor * prompt_s(n) for (n,), _ in curves["mixed"]],
    }
    return {
        curve: [value / seconds - 1 for value, (_, seconds) in zip(values, curves[curve], strict=True)]
        for curve, values in predicted.items()
    }


def describe(deviations: dict[str, list[float]]) -> str:
    """Mean and range of each curve."""
    return ", ".join(
        f"{curve} {fmean(values):+.0%} ({min(values):+.0%} to {max(values):+.0%})"
        for curve, values in deviations.items()
    )


def find_attention_s(measured: dict[str, Any], token_budget: int) -> float | None:
    """Return c, in seconds per squared token: how much longer a prompt's second chunk takes than its first.

    They differ only in the attention to what the first one computed. None if no prompt has two.
    """
    chunks = [seconds for tokens, seconds in measured["prefill"] if tokens == 2 * token_budget]
    return float((chunks[0][1] - chunks[0][0]) / (2 * token_budget**2)) if chunks else None


def judge_model(name: str, measured: dict[str, Any], token_budget: int) -> bool:
    """Print the comparison of one model; return whether its curves can be fitted."""
    profile, gpus = load_profile(name).step_model, measured["shape"]["gpus"]
    curves = read_curves(measured, token_budget, ALL_REDUCE)
    print(name + (f": one of {gpus} GPUs measured, all-reduce assumed" if gpus > 1 else ""))
    print(f"  profile against measured: {describe(compute_deviations(profile, curves, token_budget))}")
    for link in OTHER_ALL_REDUCE if gpus > 1 else ():
        deviations = compute_deviations(profile, read_curves(measured, token_budget, link), token_budget)
        rate = f"{link[0] / 1e9:.0f} GB/s and {1e6 * link[1]:.0f} µs"
        print(f"  … with all-reduce at {rate}: {describe(deviations)}")
    fitted = fit_curves(curves, token_budget)
    attention = find_attention_s(measured, token_budget)
    if attention is not None:
        print(f"  c from two chunks of one prompt: {attention:.3g}, profile {profile.c:.3g}")
    for field in COEFFICIENTS:
        print(
            f"  {field:12} profile {getattr(profile, field):.3g}, fitted {getattr(fitted.steps, field):.3g}"
        )
    errors = ", ".join(f"{curve.name} {curve.mape:.1%}" for curve in fitted.curves)
    print(f"  error of the fit: {errors}; time outside of steps {1000 * fitted.overhead_s:.1f} ms")
    return all(curve.mape <= MAPE_MAX for curve in fitted.curves)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, nargs="?", default=MEASURED, help="written by bench/gpu_steps.py")
    return parser.parse_args(arguments)


def main() -> int:
    """Compare each model of the file."""
    document = json.loads(parse_arguments().file.read_text(encoding="utf-8"))
    print(f"{document['device']}, torch {document['torch']}")
    verdicts = [
        judge_model(name, measured, document["token_budget"]) for name, measured in document["models"].items()
    ]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
