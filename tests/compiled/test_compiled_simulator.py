"""The simulator gives the same result compiled as in Python; compiling it takes a minute, once."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.compiled.build import compile_packages, describe_simulator

pytestmark = pytest.mark.timeout(600)  # compiling takes a minute of a core that may have other work


def describe_request(number: int) -> str:
    """Two a second; for half a minute mostly long answers, then mostly long prompts."""
    long_prompts = number // 60 % 2
    prompt = 500 + number % 7 * 900 + 6000 * long_prompts
    answer = 5 + number * 37 % 211 + 300 * (1 - long_prompts)
    return f"{number / 2},{prompt},{answer}\n"


TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(map(describe_request, range(240)))
"""Two minutes; `fulcrum simulate` repeats it to nine."""
POLICIES = "arrow,balanced,clairvoyant:10s,narwhal-like,static:2P2D+direct,xllm,colocated+direct+nodeflect"


@pytest.fixture(scope="module")
def compiled() -> Path:
    return compile_packages(describe_simulator())


def simulate(trace: Path, out: Path, *, compiled: Path | None) -> bytes:
    """Run the command; return its JSON without the time that it took."""
    command = [sys.executable, "-m", "fulcrum_cli", "simulate", "--trace", trace, "--json", out]
    options = ["--instances", "4", "--scale", "2", "--failures", "8", "--compare", POLICIES]
    environment = {**os.environ, "PYTHONPATH": str(compiled or "")}
    subprocess.run([*map(str, command), *options], env=environment, check=True, capture_output=True)
    return re.sub(rb'"wall_s": [0-9.]+', b'"wall_s": 0', out.read_bytes())


def test_compiled_simulator_gives_the_same_bytes(compiled: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE, encoding="utf-8")
    in_python = simulate(trace, tmp_path / "python.json", compiled=None)
    assert simulate(trace, tmp_path / "compiled.json", compiled=compiled) == in_python
    runs = json.loads(in_python)["runs"]
    assert max(run["flips"]["count"] for run in runs) > 10
    assert min(run["engine_failures"] for run in runs) > 0


def test_folder_of_the_compiled_simulator_is_what_a_program_then_loads(compiled: Path) -> None:
    code = "from fulcrum_simulator.engine import batch; from fulcrum_router.policy import ledger; "
    code += "print(batch.__file__, ledger.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(compiled)}
    loaded = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    assert all(
        path.startswith(str(compiled)) and ".py" not in path for path in loaded.stdout.decode().split()
    )
