"""Writes a fitted profile as the YAML text of a profile file, with what was not measured named in it.

`fulcrum profile` saves the text; the loader is `fulcrum_core.profiles`.
"""

from dataclasses import dataclass

import yaml

from fulcrum_core.hardware import HardwareFacts
from fulcrum_core.models import ModelFacts, kv_bytes_per_token, weight_bytes
from fulcrum_simulator.profiling.engine_client import EngineLimits
from fulcrum_simulator.profiling.fit import CurveFit, FittedLink, FittedProfile

_ASSUMED_LINK = {"link_bytes_per_s": 1e10, "link_setup_s": 0.002, "handshake_s": 0.1, "fetch_start_s": 0.0}
"""Stand for a link that was not measured: 10 GB/s, of 100 Gbit/s Ethernet; fetches delay no decodes."""
_ASSUMED_STARTUP_S = 60.0
_LIMIT_MARGIN = 1.001
"""Raises a peak that is computed from a coefficient: the loader must accept this coefficient, rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledEngine:
    """What a profile says besides the measured coefficients. `device`: None if it is not known."""

    name: str
    limits: EngineLimits
    model: ModelFacts
    device: HardwareFacts | None
    tensor_parallel: int
    token_budget: int
    max_seqs: int


def render_profile(engine: ProfiledEngine, fitted: FittedProfile, link: FittedLink | None) -> str:
    """Return the text of the profile file; `link` is None if no KV transfer was measured."""
    curves = (*fitted.curves, link.curve) if link else fitted.curves
    described = ", ".join(_describe_curve(curve) for curve in curves if curve.points)
    fields = {
        "name": engine.name,
        "description": f"{engine.limits.model}, measured: {described}.",
        **_step_fields(fitted),
        "kv_capacity_tokens": engine.limits.kv_tokens,
        "block_size": engine.limits.block_size,
        "token_budget": engine.token_budget,
        "max_seqs": min(engine.max_seqs, engine.token_budget),
        "kv_bytes_per_token": kv_bytes_per_token(engine.model),
        "params": engine.model.active_params,
        "weight_bytes": weight_bytes(engine.model),
        "tensor_parallel": engine.tensor_parallel,
        **_device_fields(engine, fitted),
        **_link_fields(engine, link),
        "startup_s": _ASSUMED_STARTUP_S,
    }
    return "\n".join([*_comments(engine, fitted, link), yaml.safe_dump(fields, sort_keys=False, width=110)])


def _describe_curve(curve: CurveFit) -> str:
    return f"mean error of {curve.name} {curve.mape:.1%} over {len(curve.points)} points"


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _step_fields(fitted: FittedProfile) -> dict[str, float]:
    steps = fitted.steps
    return {
        "t0": _round(steps.t0),
        "b": _round(steps.b),
        "c": _round(steps.c),
        "d1": _round(steps.d1),
        "d2": _round(steps.d2),
        "mixed_factor": max(1.0, _round(steps.mixed_factor)),
    }


def _device_fields(engine: ProfiledEngine, fitted: FittedProfile) -> dict[str, float]:
    """Return the device's peaks; of an unknown device the lowest peaks that permit the fit."""
    if engine.device is not None:
        return {"peak_flops": engine.device.flops, "hbm_bytes_per_s": engine.device.bandwidth_bytes_per_s}
    steps, devices = fitted.steps, engine.tensor_parallel
    read_s = max(kv_bytes_per_token(engine.model) / steps.d2, weight_bytes(engine.model) / steps.t0)
    return {
        "peak_flops": _round(_LIMIT_MARGIN * 2 * engine.model.active_params / (steps.b * devices)),
        "hbm_bytes_per_s": _round(_LIMIT_MARGIN * read_s / devices),
    }


def _link_fields(engine: ProfiledEngine, link: FittedLink | None) -> dict[str, float]:
    if link is None:
        return _ASSUMED_LINK
    return {
        "link_bytes_per_s": _round(kv_bytes_per_token(engine.model) / link.s_per_token),
        "link_setup_s": _round(link.setup_s),
        "handshake_s": _round(link.handshake_s),
        "fetch_start_s": _round(link.fetch_start_s),
    }


def _comments(engine: ProfiledEngine, fitted: FittedProfile, link: FittedLink | None) -> list[str]:
    lines = ["# Written by `fulcrum profile`. Assumed, not measured: startup_s."]
    if any(curve.name == "mixed" and not curve.points for curve in fitted.curves):
        lines.append("# Assumed, not measured: mixed_factor; no prompt could be measured beside decodes.")
    if link is None:
        lines.append("# Assumed, not measured: link, handshake and fetch values (one engine was given).")
    elif not link.fetch_starts_s:
        lines.append("# Assumed, not measured: fetch_start_s; no KV fetch could be measured beside decodes.")
    if engine.device is None:
        lines.append("# No device was given: peak_flops and hbm_bytes_per_s are the lowest that fit.")
    return lines
