"""For each import contract, a copy of the rooms with a forbidden import must fail the linter.

Some allowed imports must pass. One process lints all cases, because starting the linter is slow.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass

import pytest

from tests.paths import ROOT

ROOMS = ("core", "cluster", "router", "autoscaler", "operator", "simulator", "cli")


@dataclass(frozen=True, slots=True)
class ImportCase:
    """Files that are added to the rooms, and the contract that they break (None: the import is allowed)."""

    sentence: str
    breaks: str | None
    files: dict[str, str]


CASES = [
    ImportCase("the rooms without a change", None, {}),
    ImportCase(
        "core may not import the store", "layers", {"core/fulcrum_core/x.py": "import fulcrum_cluster"}
    ),
    ImportCase(
        "core may not import the simulator", "layers", {"core/fulcrum_core/x.py": "import fulcrum_simulator"}
    ),
    ImportCase(
        "the store may not import a shell",
        "layers",
        {"cluster/fulcrum_cluster/x.py": "import fulcrum_router"},
    ),
    ImportCase(
        "the router may not import the autoscaler",
        "layers",
        {"router/fulcrum_router/x.py": "import fulcrum_autoscaler"},
    ),
    ImportCase(
        "the autoscaler may not import the operator",
        "layers",
        {"autoscaler/fulcrum_autoscaler/x.py": "import fulcrum_operator"},
    ),
    ImportCase(
        "the operator may not import the router",
        "layers",
        {"operator/fulcrum_operator/x.py": "import fulcrum_router"},
    ),
    ImportCase(
        "the simulated fleet may not read a clock",
        "virtual-time",
        {"simulator/fulcrum_simulator/fleet/x.py": "import time"},
    ),
    ImportCase(
        "simulated requests may not wait for sockets",
        "virtual-time",
        {"simulator/fulcrum_simulator/routing/x.py": "import asyncio"},
    ),
    ImportCase(
        "no shell may import the simulator",
        "layers",
        {"operator/fulcrum_operator/x.py": "import fulcrum_simulator"},
    ),
    ImportCase(
        "nothing may import the command line",
        "layers",
        {"simulator/fulcrum_simulator/x.py": "import fulcrum_cli"},
    ),
    ImportCase(
        "two modules of a folder may not import one another",
        "no-circles",
        {
            "cluster/fulcrum_cluster/x.py": "import fulcrum_cluster.y",
            "cluster/fulcrum_cluster/y.py": "import fulcrum_cluster.x",
        },
    ),
    ImportCase(
        "two folders of a room may not import one another, through different modules",
        "no-circles",
        {
            "router/fulcrum_router/fleet/x.py": "import fulcrum_router.kv_transfer.y",
            "router/fulcrum_router/kv_transfer/y.py": "",
        },
    ),
    ImportCase(
        "the simulator may not import the store",
        "simulator-sees-pure-halves",
        {"simulator/fulcrum_simulator/x.py": "import fulcrum_cluster"},
    ),
    ImportCase(
        "the simulator may not import the operator's plan",
        "simulator-sees-pure-halves",
        {"simulator/fulcrum_simulator/x.py": "import fulcrum_operator.plan"},
    ),
    ImportCase(
        "the simulator may not import a shell module that is new",
        "simulator-sees-pure-halves",
        {"router/fulcrum_router/y.py": "", "simulator/fulcrum_simulator/x.py": "import fulcrum_router.y"},
    ),
    ImportCase(
        "a policy may not import a shell module of its own room, even a new one",
        "pure-halves-see-core",
        {
            "autoscaler/fulcrum_autoscaler/y.py": "",
            "autoscaler/fulcrum_autoscaler/policy/x.py": "import fulcrum_autoscaler.y",
        },
    ),
    ImportCase(
        "the operator's plan may not import a shell module through its manifests",
        "pure-halves-see-core",
        {
            "operator/fulcrum_operator/y.py": "",
            "operator/fulcrum_operator/manifests/x.py": "import fulcrum_operator.y",
            "operator/fulcrum_operator/plan/x.py": "import fulcrum_operator.manifests.x",
        },
    ),
    ImportCase(
        "the engine model may not import the engine server",
        "pure-halves-see-core",
        {
            "simulator/fulcrum_simulator/server/y.py": "",
            "simulator/fulcrum_simulator/engine/x.py": "import fulcrum_simulator.server.y",
        },
    ),
    ImportCase(
        "the operator's manifests may import its plan",
        None,
        {
            "operator/fulcrum_operator/plan/x.py": "",
            "operator/fulcrum_operator/manifests/x.py": "import fulcrum_operator.plan.x",
        },
    ),
    ImportCase(
        "the simulator may import the router's policy",
        None,
        {"simulator/fulcrum_simulator/x.py": "import fulcrum_router.policy"},
    ),
    ImportCase("core may not read the clock", "pure", {"core/fulcrum_core/x.py": "import time"}),
    ImportCase(
        "core may name a generator of random numbers in an annotation",
        None,
        {"core/fulcrum_core/x.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import random"},
    ),
    ImportCase(
        "the router's policy may not draw random numbers",
        "pure",
        {"router/fulcrum_router/policy/x.py": "import random"},
    ),
    ImportCase(
        "the autoscaler's policy may not await",
        "pure",
        {"autoscaler/fulcrum_autoscaler/policy/x.py": "import asyncio"},
    ),
    ImportCase(
        "the operator's plan may not touch files",
        "pure",
        {"operator/fulcrum_operator/plan/x.py": "import os"},
    ),
    ImportCase(
        "the engine adapters may not start processes",
        "pure",
        {"operator/fulcrum_operator/engines/x.py": "import subprocess"},
    ),
    ImportCase(
        "the engine model may not read the clock",
        "pure",
        {"simulator/fulcrum_simulator/engine/x.py": "from time import monotonic"},
    ),
    ImportCase(
        "a policy may not read the clock through a neighbouring module",
        "pure",
        {
            "router/fulcrum_router/y.py": "import time",
            "router/fulcrum_router/policy/x.py": "import fulcrum_router.y",
        },
    ),
    ImportCase(
        "a policy may not import the store",
        "pure-halves-see-core",
        {"cluster/fulcrum_cluster/y.py": "", "router/fulcrum_router/policy/x.py": "import fulcrum_cluster.y"},
    ),
    ImportCase(
        "the operator may not draw", "only-cli-draws", {"operator/fulcrum_operator/x.py": "import rich.table"}
    ),
    ImportCase(
        "the autoscaler may not parse HTTP by hand",
        "only-router-parses-http",
        {"autoscaler/fulcrum_autoscaler/x.py": "import httptools"},
    ),
]

# Runs in the copy. Writes the files of each case, lints and removes them. Prints the ids of broken contracts.
# A case is a pair: its files, and the contracts that are linted (all contracts if the list is empty).
LINT_PROGRAM = r"""
import contextlib, io, json, pathlib, re, sys
from importlinter import configuration
from importlinter.application.use_cases import lint_imports
configuration.configure()
names = {c["name"]: c["id"] for c in json.loads(sys.argv[1])}
CACHE, broken = ".lint-cache", []
for files, limited_to in json.load(sys.stdin):
    for name, source in files.items():
        pathlib.Path(name).write_text(source)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        lint_imports(
            config_filename="pyproject.toml", limit_to_contracts=limited_to, cache_dir=CACHE, no_logo=True
        )
    results = re.findall(r"^(.+) (KEPT|BROKEN)", output.getvalue(), re.MULTILINE)
    if {names[name] for name, _ in results} != set(limited_to or names.values()):
        sys.exit(output.getvalue())
    broken.append([names[name] for name, result in results if result == "BROKEN"])
    for name in files:
        pathlib.Path(name).unlink()
print(json.dumps(broken))
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The contracts that each case breaks, by the case's sentence."""
    copy = tmp_path_factory.mktemp("rooms")
    skip = shutil.ignore_patterns("__pycache__")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", copy)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    linted = subprocess.run(
        [
            sys.executable,
            "-c",
            LINT_PROGRAM,
            json.dumps([{"id": c["id"], "name": c["name"]} for c in contracts]),
        ],
        input=json.dumps([(case.files, [case.breaks] if case.breaks else []) for case in CASES]),
        env=os.environ | {"PYTHONPATH": ":".join(str(copy / room) for room in ROOMS), "COLUMNS": "200"},
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr
    return {case.sentence: ids for case, ids in zip(CASES, json.loads(linted.stdout), strict=True)}


FORBIDDEN = [case for case in CASES if case.breaks is not None]
ALLOWED = [case for case in CASES if case.breaks is None]


@pytest.mark.parametrize("case", FORBIDDEN, ids=lambda case: case.sentence)
def test_a_forbidden_import_breaks_its_contract(case: ImportCase, broken: dict[str, list[str]]) -> None:
    assert case.breaks in broken[case.sentence]


@pytest.mark.parametrize("case", ALLOWED, ids=lambda case: case.sentence)
def test_an_allowed_import_breaks_no_contract(case: ImportCase, broken: dict[str, list[str]]) -> None:
    assert broken[case.sentence] == []


def test_every_import_contract_has_a_breaking_case() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {case.breaks for case in FORBIDDEN} == {contract["id"] for contract in contracts}
