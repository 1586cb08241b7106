"""`fulcrum profile` measures two engine servers in real time and writes a profile that can be used."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fulcrum_cli.__main__ import main
from fulcrum_core.profiles import load_profile
from tests.integration.simulator.servers import Server, launch, ready
from tests.paths import MODELS

TRUTH = load_profile("laptop").model_copy(
    update={
        "name": "quick",
        "t0": 0.01,
        "kv_capacity_tokens": 1024,
        "startup_s": 0.0,
        "handshake_s": 0.05,
    }
)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    path = tmp_path / "quick.yaml"
    path.write_text(yaml.safe_dump(TRUTH.model_dump()))
    processes = [launch(path, "--seed", "1") for _ in range(2)]
    started = (ready(processes[0]), ready(processes[1]))
    yield started
    for server in started:
        server.kill()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exited:
        main(["profile", *arguments])
    return int(exited.value.code or 0)


def test_two_engines_are_measured_and_the_profile_can_be_loaded(
    servers: tuple[Server, Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "measured.yaml"
    code = run(
        *(server.url for server in servers),
        *("--model-config", str(MODELS / "tiny-llama"), "--out", str(out)),
        *(
            "--token-budget",
            str(TRUTH.token_budget),
            "--max-seqs",
            "64",
            "--max-batch",
            "2",
            "--repeats",
            "1",
        ),
    )
    stdout, stderr = capsys.readouterr()
    profile = load_profile(str(out))
    assert code in (0, 1), "the curves of a busy machine may be off by more than 10 %"
    assert [line.split()[0] for line in stdout.splitlines()[:5]] == [
        "CURVE",
        "prefill",
        "decode",
        "mixed",
        "transfer",
    ]
    assert (profile.name, profile.kv_capacity_tokens, profile.block_size) == ("measured", 1024, 16)
    assert (profile.token_budget, profile.max_seqs) == (TRUTH.token_budget, 64)
    assert "measuring first KV transfer" in stderr
    assert "a KV fetch adds" in stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("ftp://a",), "error: URL (ftp://a) must begin with http:// or https://\n"),
        (("http://a", "http://b", "http://c"), "error: URL (3 addresses) must be one or two\n"),
        (("http://a", "--repeats", "0"), "error: --repeats (0) must be at least 1\n"),
        (("http://a", "--max-batch", "257"), "error: --max-batch (257) is above --max-seqs (256)\n"),
        (("http://a", "--token-budget", "32"), "error: --token-budget (32) must be above --max-batch\n"),
        (
            ("http://a", "--device", "abacus"),
            "error: --device (abacus) is not a device with known peaks: leave it out\n",
        ),
        (("http://a", "--out", "x.txt"), "error: --out (x.txt) must end in .yaml\n"),
        (("http://a", "--model-config", "nowhere"), "error: nowhere (No such file or directory) must be a"),
    ],
)
def test_a_bad_option_is_one_line_before_anything_is_measured(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ("--model-config", str(MODELS / "tiny-llama"), "--out", str(tmp_path / "out.yaml"))
    code = run(*fixed, *options)
    assert (code, capsys.readouterr().err[: len(message)]) == (2, message)


def test_an_engine_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.yaml"
    code = run("http://127.0.0.1:9", "--model-config", str(MODELS / "tiny-llama"), "--out", str(out))
    error = capsys.readouterr().err
    assert (code, error.count("\n"), out.exists()) == (2, 1, False)
    assert error.startswith("error: http://127.0.0.1:9: cannot be reached: ")
