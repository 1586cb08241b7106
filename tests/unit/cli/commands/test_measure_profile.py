"""`fulcrum profile` sends other prompts in each run: the engine may have cached those of the last one."""

import re
from pathlib import Path

import pytest

from fulcrum_cli.commands.measure_profile import ProfileOptions, format_report, run
from fulcrum_core.latency import StepModel
from fulcrum_simulator.profiling import (
    CurveFit,
    EngineClient,
    EngineLimits,
    EngineUnusable,
    FittedLink,
    FittedPoint,
    FittedProfile,
    hide_credentials,
)
from tests.paths import MODELS


def test_a_second_run_sends_prompts_that_no_engine_has_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts = []

    async def record_prompt(client: EngineClient) -> EngineLimits:
        prompts.append(tuple(client.make_prompt(8)))
        raise EngineUnusable(client.url, "is played here")

    monkeypatch.setattr(EngineClient, "read_limits", record_prompt)
    options = ProfileOptions(
        urls=("http://127.0.0.1:1",),
        model_config=MODELS / "tiny-llama",
        out=tmp_path / "measured.yaml",
        device=None,
        tensor_parallel=1,
        token_budget=512,
        max_seqs=64,
        max_batch=2,
        repeats=1,
    )
    for _ in range(2):
        with pytest.raises(EngineUnusable):
            run(options)

    assert len(set(prompts)) == 2


def test_a_curve_that_does_not_fit_is_shown_point_by_point() -> None:
    good = CurveFit("prefill", (FittedPoint("64 tokens", 0.1, 0.101),))
    bad = CurveFit(
        "decode",
        (
            FittedPoint("1 request, 76 tokens of KV", 0.02, 0.016),
            FittedPoint("16 requests, 1216 tokens of KV", 0.04, 0.041),
        ),
    )
    steps = StepModel(t0=0.01, b=1e-4, c=1e-9, d1=1e-3, d2=1e-6, mixed_factor=1.1)

    link = FittedLink(0.0, 1e-6, 0.0, (0.05, 0.07), CurveFit("transfer", ()))
    report = format_report((good, bad), FittedProfile(steps, 0.0, (good, bad)), link, Path("m.yaml"))

    lines = [re.split(" {2,}", line) for line in report]
    assert [line for line in lines if len(line) == 5] == [
        ["CURVE", "POINT", "MEASURED", "FITTED", "ERROR"],
        ["decode", "1 request, 76 tokens of KV", "20 ms", "16 ms", "-20.0%"],
        ["decode", "16 requests, 1216 tokens of KV", "40 ms", "41 ms", "+2.5%"],
    ]
    assert "a KV fetch adds 60 ms to the step in which it starts (50 ms to 70 ms by length)" in report
    assert "decode: off by more than 10% on average; publish no figure from this profile" in report


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:secret@host:8000: cannot be reached", "http://***@host:8000: cannot be reached"),
        ("first KV transfer to https://u:p@ss/w@host", "first KV transfer to https://***@host"),
        ("user:secret@host", "***@host"),
        ("http://host:8000", "http://host:8000"),
    ],
)
def test_no_password_of_an_address_is_shown(text: str, shown: str) -> None:
    assert hide_credentials(text) == shown


def test_an_error_of_an_engine_shows_no_password() -> None:
    error = EngineUnusable("http://user:secret@host", "cannot be reached: http://user:secret@host/metrics")
    assert str(error) == "http://***@host: cannot be reached: http://***@host/metrics"
