"""Engines accept each generated flag, variable and key, by their own parsers."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from fulcrum_cli.local.engine_environment import find_engine_environment
from tests.engines.services import require_engines
from tests.unit.operator.engine_cases import CASES, plan_case


def find_launch_problems(launches: dict[str, dict[str, list[str]]]) -> dict[str, list[str]]:
    """Return the problems by launch; one process checks all, because importing the engines takes 15 s."""
    require_engines()
    run = subprocess.run(
        [find_engine_environment() / "bin/python", Path(__file__).with_name("check_launches.py")],
        input=json.dumps(launches),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={
            **os.environ,
            "VLLM_LOGGING_LEVEL": "ERROR",
            "LMCACHE_LOG_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert run.returncode == 0, run.stderr[-4000:]
    problems_by_name: dict[str, list[str]] = json.loads(run.stdout)
    return problems_by_name


@pytest.mark.timeout(300)  # importing the engines takes 15 s, and many times that on a busy machine
def test_engines_accept_every_generated_flag_variable_and_key() -> None:
    plans = {case.name: plan_case(case).launch for case in CASES}
    launches = {
        name: {"argv": list(launch.command[2:]), "env": [variable.name for variable in launch.env]}
        for name, launch in plans.items()
        if launch is not None
    }
    wrong = {
        "argv": [
            "m",
            "--no-such-flag",
            "--attention-backend",
            "NONE",
            "--kv-transfer-config",
            _build_wrong_config(),
        ],
        "env": ["VLLM_NO_SUCH_VARIABLE"],
    }
    problems = find_launch_problems({**launches, "wrong": wrong})
    found = problems.pop("wrong")  # a wrong launch is found, so the check works
    assert problems == {name: [] for name in launches}
    assert found == [
        "vLLM reads no variable VLLM_NO_SUCH_VARIABLE",
        "vLLM knows no argument --no-such-flag",
        "vLLM knows no attention backend NONE",
        "NixlConnector reads no key kv_lease",
        "LMCache does not accept True for the key lmcache.enable_pdd",
    ]


def _build_wrong_config() -> str:
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kv_lease": 30},
    }
    lmcache = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.enable_pdd": True},
    }
    extra = {"connectors": [nixl, lmcache]}
    return json.dumps(
        {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    )
