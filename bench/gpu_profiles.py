"""Compares engine profiles with the steps that `bench/gpu_steps.py` measured on a GPU.

    python bench/gpu_profiles.py FILE

Fits each model's coefficients as `fulcrum profile` does, and prints them beside those of the shipped profile,
with the mean error of the profile's predictions on each curve. Of a model on several GPUs one GPU's part was
measured, without the sums over all GPUs; they are estimated and added. Exit code 1 if a curve cannot be
fitted within 10 % (`fulcrum profile` has the same limit).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fulcrum_core.latency import StepModel
from fulcrum_core.profiles import load_profile
from fulcrum_simulator.profiling.fit import FittedProfile, fit_profile
from fulcrum_simulator.profiling.samples import DecodeMeasurement, MixedMeasurement, PrefillMeasurement

MAPE_MAX = 0.10
TOKEN_BUDGET = 8192
SUM_BYTES_PER_S, SUM_SETUP_S = 3.6e11, 8e-6
"""Rate and least duration of a sum over the GPUs of a node (all-reduce over NVLink 4), assumed."""
BYTES_PER_VALUE, SUMS_PER_LAYER = 2, 2
COEFFICIENTS = ("t0", "b", "c", "d1", "d2", "mixed_factor")


def compute_sum_s(shape: dict[str, Any], tokens: int) -> float:
    """Estimate the seconds that a step of `tokens` spends on sums over all GPUs of the model (ring)."""
    gpus = shape["gpus"]
    moved = BYTES_PER_VALUE * shape["hidden"] * tokens * 2 * (gpus - 1) / gpus
    return SUMS_PER_LAYER * shape["layers"] * (SUM_SETUP_S + moved / SUM_BYTES_PER_S) if gpus > 1 else 0.0


def fit_model(measured: dict[str, Any]) -> FittedProfile:
    """Fit the coefficients of one model's curves, with the estimated sums."""
    shape = measured["shape"]

    def sums_s(tokens: int) -> float:
        steps = -(-tokens // TOKEN_BUDGET)
        return (steps - 1) * compute_sum_s(shape, 0) + compute_sum_s(shape, tokens)

    return fit_profile(
        prefill=[PrefillMeasurement(tokens, s + sums_s(tokens)) for tokens, s in measured["prefill"]],
        decode=[
            DecodeMeasurement(batch, batch * context, s + sums_s(batch))
            for batch, context, s in measured["decode"]
        ],
        mixed=[MixedMeasurement(tokens, s + sums_s(tokens) - sums_s(0)) for tokens, s in measured["mixed"]],
        token_budget=TOKEN_BUDGET,
    )


def predict_errors(steps: StepModel, measured: dict[str, Any]) -> dict[str, float]:
    """Mean of predicted ÷ measured - 1 on each curve, with its sign: above 0, the profile is too slow."""
    shape = measured["shape"]

    def prompt_s(tokens: int) -> float:
        return -(-tokens // TOKEN_BUDGET) * steps.t0 + steps.b * tokens + steps.c * tokens**2

    predicted = {
        "prefill": [
            prompt_s(tokens) / (s + compute_sum_s(shape, tokens)) for tokens, s in measured["prefill"]
        ],
        "decode": [
            steps.step_s((), [context] * batch) / (s + compute_sum_s(shape, batch))
            for batch, context, s in measured["decode"]
        ],
    }
    return {curve: fmean(ratios) - 1 for curve, ratios in predicted.items()}


def print_model(name: str, measured: dict[str, Any], fitted: FittedProfile) -> None:
    """Print coefficients of profile and fit side by side, in seconds, and their errors."""
    shipped = load_profile(name).step_model
    gpus = measured["shape"]["gpus"]
    print(f"{name}" + (f" (one of {gpus} GPUs measured, sums estimated)" if gpus > 1 else ""))
    for field in COEFFICIENTS:
        of_profile, of_fit = getattr(shipped, field), getattr(fitted.steps, field)
        print(f"  {field:12} profile {of_profile:.3g}, measured {of_fit:.3g}: {of_profile / of_fit:.2f} x")
    fit_errors = ", ".join(f"{error.curve} {error.mape:.1%}" for error in fitted.errors)
    print(f"  error of the fit: {fit_errors}; a prompt takes {1000 * fitted.overhead_s:.1f} ms more")
    errors = predict_errors(shipped, measured)
    print("  profile against measured: " + ", ".join(f"{curve} {e:+.0%}" for curve, e in errors.items()))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="what bench/gpu_steps.py has written")
    return parser.parse_args(arguments)


def main() -> int:
    """Fit and compare each model of the file."""
    document = json.loads(parse_arguments().file.read_text(encoding="utf-8"))
    print(f"{document['device']}, torch {document['torch']}")
    worst = 0.0
    for name, measured in document["models"].items():
        fitted = fit_model(measured)
        print_model(name, measured, fitted)
        worst = max(worst, *(error.mape for error in fitted.errors))
    return 1 if worst > MAPE_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
