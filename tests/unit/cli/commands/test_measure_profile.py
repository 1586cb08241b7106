"""`fulcrum profile` sends other prompts in each run: the engine may have cached those of the last one."""

from pathlib import Path

import pytest

from fulcrum_cli.commands.measure_profile import ProfileOptions, run
from fulcrum_simulator.profiling import EngineClient, EngineLimits, EngineUnusable
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
