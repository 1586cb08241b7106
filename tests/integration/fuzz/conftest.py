"""Fixture of the fuzz targets: run one for the seconds of `--fuzz-seconds`, with the seed of the run."""

import random
from collections.abc import Sequence
from typing import Protocol

import pytest

from tests.conftest import RecordMeasurement
from tests.integration.fuzz.fuzzing import Fuzzer, Target


class RunFuzzer(Protocol):
    """`run_fuzzer(target, corpus, tokens)` fails with the input that broke a promise."""

    def __call__(self, target: Target, corpus: Sequence[bytes], tokens: Sequence[bytes]) -> None: ...


@pytest.fixture
def run_fuzzer(request: pytest.FixtureRequest, seed: int, record_measurement: RecordMeasurement) -> RunFuzzer:
    """Run a fuzz target; see `RunFuzzer`."""

    def run(target: Target, corpus: Sequence[bytes], tokens: Sequence[bytes]) -> None:
        fuzzer = Fuzzer(target, corpus, tokens, random.Random(seed))
        done = fuzzer.run(request.config.getoption("--fuzz-seconds"))
        record_measurement(f"{request.node.name}: {done}")

    return run
