"""The model whose steps are measured on GPUs computes the same in one prompt, in chunks and by a decode."""

import subprocess
from pathlib import Path

import pytest

from fulcrum_cli.local.engine_environment import find_engine_environment
from tests.engines.services import require_engines

STEPS = Path(__file__).parents[2] / "bench" / "gpu_steps.py"


@pytest.mark.timeout(300)  # importing torch takes seconds, and many times that on a busy machine
def test_logits_of_chunks_and_of_a_decode_are_those_of_the_whole_prompt() -> None:
    require_engines()
    result = subprocess.run(
        [find_engine_environment() / "bin/python", STEPS, "--check"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
