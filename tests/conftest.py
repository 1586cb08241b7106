"""Prints the seed, the measurements, and everything that a test run left out.

A run that fails by chance must be repeatable, so one seed drives Hypothesis and each test with the fixture
`seed`. An incomplete run must not look complete, so skipped tests and folders that were not run are listed.
"""

import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings

from tests.paths import GOLDEN, ROOT

settings.register_profile("shrink", deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No deadline: how long an example takes depends on the other work of the machine."""
settings.register_profile(
    "fulcrum",
    settings.get_profile("shrink"),
    max_examples=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
"""Each run draws other examples, so that a few a run are enough. A failing example is shown as it was found:
a state machine's would be shrunk for up to five minutes.
"""
settings.load_profile("fulcrum")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this repository's tests."""
    parser.addoption("--seed", type=int, default=None, help="seed of the run (default: a new one, printed)")
    parser.addoption(
        "--fuzz-seconds",
        type=float,
        default=10.0,
        help="how long each fuzz target of tests/integration/fuzz runs (default: %(default)s)",
    )
    parser.addoption(
        "--cancelled-requests",
        type=int,
        default=4_000,
        help="requests of the test that cancels each at a random time (default: %(default)s)",
    )
    parser.addoption(
        "--interleavings",
        type=int,
        default=200,
        help="interleavings of concurrent writers on a real API server (default: %(default)s)",
    )
    parser.addoption(
        "--specs",
        type=int,
        default=8,
        help="random services that the operator gets in tests/kubernetes (default: %(default)s)",
    )
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write tests/golden/ from the code's current output; git diff then shows what changed",
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its own option
def pytest_configure(config: pytest.Config) -> None:
    """Choose one seed for the run and pass it to Hypothesis, unless Hypothesis has an own seed."""
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(2**32)
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.option.seed)
    _configure_logging()


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of the run, for `random.Random(seed)`; printed at the end."""
    value: int = request.config.option.seed
    return value


RecordMeasurement = Callable[[str], None]

TARGETS = {
    "integration": "test",
    "examples": "test",
    "compiled": "test-compiled",
    "kubernetes": "test-kubernetes",
    "engines": "test-engines",
}
"""The make target that runs each folder of tests; `check` runs the others."""

_MEASUREMENTS: list[str] = []


@pytest.fixture(scope="session")
def record_measurement() -> RecordMeasurement:
    """`record_measurement(text)` prints the text at the end of the run, in the section "measured"."""
    return _MEASUREMENTS.append


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(path, text)` fails unless the file `path` below tests/golden/ contains exactly this text."""

    def compare(path: str, text: str) -> None:
        file = GOLDEN / path
        if request.config.option.rewrite_golden:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        recorded = file.read_text(encoding="utf-8") if file.exists() else ""
        assert text == recorded, f"tests/golden/{path} differs; --rewrite-golden rewrites it"

    return compare


@pytest.fixture(autouse=True)
def reset_logging() -> Iterator[None]:
    """Undo the log configuration of a program that ran within a test."""
    yield
    _configure_logging()


def _configure_logging() -> None:
    """Use structlog's defaults with plain tracebacks: drawing one with rich takes 0.2 s of CPU."""
    structlog.reset_defaults()
    *processors, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*processors, renderer])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the measurements, the tests and folders left out, and the seed that repeats the run."""
    if _MEASUREMENTS:
        terminalreporter.section("measured")
        for line in _MEASUREMENTS:
            terminalreporter.line(line)
    terminalreporter.section("left out", yellow=True, bold=True)
    left_out = [
        *_list_skipped_tests(terminalreporter.stats.get("skipped", [])),
        *_list_folders_not_run(config),
    ]
    for line in left_out:
        terminalreporter.line(f"LEFT OUT {line}", yellow=True)
    terminalreporter.line(f"seed: repeat this run with --seed {config.option.seed}")


def _list_skipped_tests(reports: Iterable[pytest.TestReport]) -> list[str]:
    by_reason: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        by_reason[reason.removeprefix("Skipped: ")].add(report.nodeid)
    return [f"{_name_tests(by_reason[reason])}: {reason}" for reason in sorted(by_reason)]


def _name_tests(names: Collection[str]) -> str:
    """Return the name of a single test; the number of several, of which `-rs` shows the places."""
    return f"{len(names)} tests" if len(names) > 1 else next(iter(names))


def _list_folders_not_run(config: pytest.Config) -> Iterator[str]:
    if os.environ.get("TEST_LOT"):
        return  # `tools/test` runs the other folders, too
    requested = [(config.invocation_params.dir / arg).resolve() for arg in config.args]
    if not all(path.is_dir() for path in requested):
        return  # single files: a list of all other folders would be noise
    for folder in sorted((ROOT / "tests").iterdir()):
        touched = any(folder.is_relative_to(path) or path.is_relative_to(folder) for path in requested)
        if not touched and any(folder.rglob("test_*.py")):
            yield f"tests/{folder.name}: not run; make {TARGETS.get(folder.name, 'check')} runs it"
