"""Measures a running engine over vLLM's HTTP API, and fits the coefficients of an engine profile.

`points` chooses what to measure, `measure` measures it through `engine_client`, and `fit` computes the
coefficients; `document` writes them as a profile file. `fulcrum profile` calls it.
"""

from fulcrum_simulator.profiling.document import ProfiledEngine, render_profile
from fulcrum_simulator.profiling.engine_client import (
    EngineClient,
    EngineLimits,
    EngineUnusable,
    hide_credentials,
)
from fulcrum_simulator.profiling.fit import (
    CurveFit,
    FittedLink,
    FittedPoint,
    FittedProfile,
    fit_link,
    fit_profile,
)
from fulcrum_simulator.profiling.measure import Measurer
from fulcrum_simulator.profiling.points import MeasurementPlan, plan_measurement

__all__ = [
    "CurveFit",
    "EngineClient",
    "EngineLimits",
    "EngineUnusable",
    "FittedLink",
    "FittedPoint",
    "FittedProfile",
    "MeasurementPlan",
    "Measurer",
    "ProfiledEngine",
    "fit_link",
    "fit_profile",
    "hide_credentials",
    "plan_measurement",
    "render_profile",
]
