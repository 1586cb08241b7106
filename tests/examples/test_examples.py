"""Each example starts in a local run and serves a request with the right text."""

from pathlib import Path

import pytest

from fulcrum_cli.local.run import LocalRunOptions, run_local
from fulcrum_core.api.manifest import load_manifest
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.values import Slo
from fulcrum_simulator.client import LoadGenerator, LoadTarget
from fulcrum_simulator.workload import WorkloadRequest
from tests.paths import EXAMPLES

NEEDS_ENGINES = {"vllm-cpu"}  # what runs real engines is brought up by the tests of those
FILES = sorted(EXAMPLES.glob("*.yaml"))
SIMULATED = [path for path in FILES if path.stem not in NEEDS_ENGINES]


@pytest.mark.parametrize("path", SIMULATED, ids=lambda path: path.stem)
async def test_example_starts_and_responds_with_the_right_text(path: Path) -> None:
    objects = load_manifest(path.read_text(), source=path.name)
    service = next(obj for obj in objects if isinstance(obj, PDService))
    async with run_local(objects, LocalRunOptions(port=0)) as run:
        instances = await run.wait_serving()
        host, port = run.info.router_url.removeprefix("http://").split(":")
        target = LoadTarget(host=host, port=int(port), model=service.spec.model, chat_share=0.5)
        load = LoadGenerator(target, slo=Slo(60.0, 60.0), seed=1)
        await load.send([WorkloadRequest(number * 0.02, 100, 5) for number in range(6)])
        await load.finish(timeout_s=20.0)
    report = load.results.report()
    assert (report.ok, report.reasons) == (6, {})
    assert len(instances) == sum(pool.instances.min for pool in service.spec.resolve_pools())


def test_the_documented_examples_exist() -> None:
    assert {path.stem for path in SIMULATED} >= {"chat", "play", "replay"}
