"""`fulcrum profile`: measures one or two running engines, and writes an engine profile for simulations.

`fulcrum_simulator.profiling` chooses the points, measures and fits; this module reads the options and prints
how far each curve is from its fit. It starts no engine.
"""

import asyncio
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from fulcrum_cli.local.engine_environment import read_model_config
from fulcrum_cli.option_values import check_writable
from fulcrum_cli.output_files import write_text_file
from fulcrum_cli.terminal.output import format_columns
from fulcrum_core.errors import InvalidInput
from fulcrum_core.hardware import HardwareFacts, find_hardware
from fulcrum_core.profiles import parse_profile
from fulcrum_simulator.profiling import (
    CurveFit,
    EngineClient,
    EngineLimits,
    FittedLink,
    FittedProfile,
    Measurer,
    ProfiledEngine,
    fit_link,
    fit_profile,
    hide_credentials,
    plan_measurement,
    render_profile,
)

ERROR_MAX = 0.10
"""Mean error of a curve above which figures computed from the profile should not be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options, as typed."""

    urls: tuple[str, ...]
    """The engine to measure, and if given a second one to which it transfers KV."""
    model_config: Path
    out: Path
    device: str | None
    tensor_parallel: int
    token_budget: int
    max_seqs: int
    max_batch: int
    repeats: int


@dataclass(frozen=True, slots=True)
class _Measured:
    limits: EngineLimits
    fitted: FittedProfile
    link: FittedLink | None


def run(options: ProfileOptions) -> int:
    """Measure, write the profile and print how well it fits; return 1 if a curve is off by more than 10 %.

    Raises:
        InvalidInput: for an option that breaks a rule, or a fit below the device's physical limits.
        EngineUnusable: if an engine cannot be measured.
    """
    _check(options)
    device = _find_device(options.device)
    model = read_model_config(options.model_config)
    measured = asyncio.run(_measure(options))
    engine = ProfiledEngine(
        name=options.out.stem,
        limits=measured.limits,
        model=model,
        device=device,
        tensor_parallel=options.tensor_parallel,
        token_budget=options.token_budget,
        max_seqs=options.max_seqs,
    )
    text = render_profile(engine, measured.fitted, measured.link)
    parse_profile(text, source=str(options.out))
    write_text_file("--out", options.out, text)
    curves = (*measured.fitted.curves, *([measured.link.curve] if measured.link else []))
    print("\n".join(format_report(curves, measured.fitted, measured.link, options.out)))
    return 1 if any(curve.mape > ERROR_MAX for curve in curves) else 0


def _check(options: ProfileOptions) -> None:
    if len(options.urls) > 2:
        raise InvalidInput("URL", f"{len(options.urls)} addresses", "must be one or two")
    for url in options.urls:
        if not url.startswith(("http://", "https://")):
            raise InvalidInput("URL", hide_credentials(url), "must begin with http:// or https://")
    for option, count in (
        ("--tensor-parallel", options.tensor_parallel),
        ("--max-seqs", options.max_seqs),
        ("--max-batch", options.max_batch),
        ("--repeats", options.repeats),
    ):
        if count < 1:
            raise InvalidInput(option, count, "must be at least 1")
    if options.max_batch > options.max_seqs:
        raise InvalidInput("--max-batch", options.max_batch, f"is above --max-seqs ({options.max_seqs})")
    if options.token_budget <= options.max_batch:
        raise InvalidInput("--token-budget", options.token_budget, "must be above --max-batch")
    if options.out.suffix not in (".yaml", ".yml"):
        raise InvalidInput("--out", options.out, "must end in .yaml")
    check_writable("--out", options.out)


def _find_device(name: str | None) -> HardwareFacts | None:
    if name is None:
        return None
    found = find_hardware(name)
    if found is None or not (found.flops and found.bandwidth_bytes_per_s):
        raise InvalidInput("--device", name, "is not a device with known peaks: leave it out")
    return found


async def _measure(options: ProfileOptions) -> _Measured:
    async with AsyncExitStack() as stack:
        # No seed of an earlier run: engines may still have its prompts in their prefix caches.
        seeds = random.SystemRandom()
        clients = [
            await stack.enter_async_context(EngineClient.open(url, seed=seeds.getrandbits(64)))
            for url in options.urls
        ]
        limits = await clients[0].read_limits()
        for other in clients[1:]:
            await other.read_limits()
        plan = plan_measurement(
            max_model_tokens=limits.max_model_tokens,
            kv_tokens=limits.kv_tokens,
            block_size=limits.block_size,
            token_budget=options.token_budget,
            max_batch=options.max_batch,
        )
        measurer = Measurer(
            clients[0], limits, token_budget=options.token_budget, repeats=options.repeats, report=_report
        )
        await measurer.warm_up(plan)
        curves = await measurer.measure(plan, *clients[1:])
        fitted = fit_profile(
            prefill=curves.prefill,
            decode=curves.decode,
            mixed=curves.mixed,
            token_budget=options.token_budget,
        )
        first = curves.first_transfer
        link = fit_link(first, curves.transfers, curves.fetches, fitted) if first else None
        return _Measured(limits, fitted, link)


def _report(line: str) -> None:
    print(f"measuring {hide_credentials(line)}", file=sys.stderr, flush=True)


def format_report(
    curves: tuple[CurveFit, ...], fitted: FittedProfile, link: FittedLink | None, out: Path
) -> list[str]:
    """Return the lines that the command prints; the points of curves that do not fit are among them."""
    steps = fitted.steps
    off = [curve for curve in curves if curve.mape > ERROR_MAX]
    names = ", ".join(curve.name for curve in off)
    warning = [
        "",
        *_list_points(off),
        f"{names}: off by more than {ERROR_MAX:.0%} on average; publish no figure from this profile",
    ]
    return [
        *format_columns(
            ("CURVE", "POINTS", "MEAN ERROR"),
            *(
                (curve.name, str(len(curve.points)), f"{curve.mape:.1%}" if curve.points else "-")
                for curve in curves
            ),
        ),
        "",
        f"empty step {steps.t0 * 1000:.3g} ms, prompt token {steps.b * 1e6:.3g} µs, "
        f"decoding request {steps.d1 * 1e6:.3g} µs, token of context {steps.d2 * 1e9:.3g} ns, "
        f"prefill in a step with decodes × {steps.mixed_factor:.3g}; "
        f"outside of steps {fitted.overhead_s * 1000:.3g} ms a request",
        *(_describe_fetches(link) if link else []),
        *(warning if off else []),
        f"wrote {out}: pass it as a profile",
    ]


def _describe_fetches(link: FittedLink) -> list[str]:
    starts = link.fetch_starts_s
    if not starts:
        return ["a KV fetch beside decodes could not be measured"]
    by_length = f"{_ms(min(starts))} to {_ms(max(starts))} by length"
    return [f"a KV fetch adds {_ms(link.fetch_start_s)} to the step in which it starts ({by_length})"]


def _list_points(curves: Sequence[CurveFit]) -> list[str]:
    """Return a table of the points of these curves: where an engine does not follow the formula of a step."""
    points = [(curve.name, point) for curve in curves for point in curve.points]
    return format_columns(
        ("CURVE", "POINT", "MEASURED", "FITTED", "ERROR"),
        *(
            (name, point.name, _ms(point.measured_s), _ms(point.fitted_s), f"{point.error:+.1%}")
            for name, point in points
        ),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.4g} ms"
