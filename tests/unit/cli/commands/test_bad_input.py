"""Bad input is reported as one line on standard error, with path, value and rule, and exit code 2."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fulcrum_cli.__main__ import main
from tests.paths import ROOT

Cli = Callable[..., str]

NO_TARGET_FOUND = (
    "No cluster and no local run found: KUBECONFIG (nowhere) names no existing file. "
    "Pass --kubeconfig, or start one with `fulcrum up --local`."
)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run the command line, expect exit code 2, and return its one line without `error: `."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "nowhere")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exited:
            main(arguments)
        out, err = capsys.readouterr()
        assert (exited.value.code, out) == (2, "")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        assert [path.name for path in tmp_path.glob("fulcrum-*/*")] == []
        return err.removeprefix("error: ").rstrip("\n")

    return run


def manifest(folder: Path, spec: Sequence[str], *, kind: str = "PDService") -> Path:
    path = folder / "service.yaml"
    head = [
        "apiVersion: fulcrum.dev/v1alpha1",
        f"kind: {kind}",
        "metadata: {name: chat}",
        "spec:",
        "  model: m",
    ]
    path.write_text("\n".join([*head, *(f"  {line}" for line in spec)]) + "\n")
    return path


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(["replicas: 3"], "spec.replicas (3) is not a field", id="an unknown field"),
        pytest.param(
            ["pools: [{name: a, instances: {min: 5, max: 4}}]"],
            "spec.pools[0].instances ({min: 5, max: 4}) min (5) is greater than max (4)",
            id="min above max",
        ),
        pytest.param(
            ["pools: [{name: a}]"],
            "spec.pools[0].instances (nothing) is required",
            id="a pool that does not say how many instances",
        ),
        pytest.param(
            ["pools: [{name: a, instances: {min: 0}}]"],
            "spec.pools[0].instances.min (0) is less than 1",
            id="a pool without instances",
        ),
        pytest.param(["slo: {ttft: 0s}"], "spec.slo.ttft (0.0) is not greater than 0", id="an SLO of zero"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(
    refused: Cli, tmp_path: Path, spec: list[str], expected: str
) -> None:
    path = manifest(tmp_path, spec)
    assert refused("up", "--local", "-f", str(path)) == f"{path}[0]: {expected}"
    assert refused("play", "--headless", "-f", str(path)) == f"{path}[0]: {expected}"


def test_instances_and_pools_exclude_each_other(refused: Cli, tmp_path: Path) -> None:
    path = manifest(tmp_path, ["instances: 2", "pools: [{name: a, instances: {min: 1}}]"])
    assert refused("up", "--local", "-f", str(path)).endswith(
        "has both instances and pools: write one of them"
    )


def test_a_tier_that_does_not_exist_is_named(refused: Cli, tmp_path: Path) -> None:
    path = manifest(tmp_path, ["qosTiers: [gold]"])
    assert "gold" in refused("up", "--local", "-f", str(path))


def test_a_profile_under_its_physical_floor_is_refused(refused: Cli, tmp_path: Path) -> None:
    profile = tmp_path / "fast.yaml"
    shipped = ROOT / "core" / "fulcrum_core" / "data" / "profiles" / "laptop.yaml"
    profile.write_text(shipped.read_text().replace("t0: 1.8e-2", "t0: 1.0e-3"))
    path = manifest(tmp_path, [f"engine: {{type: Simulated, profile: {profile}}}"])
    assert refused("up", "--local", "-f", str(path)).startswith(
        f"{profile}.t0 (0.001) is below its physical limit 0.01"
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            "arrival_s,input_tokens\n0,1\n",
            "must hold the field output_tokens of the Fulcrum layout",
            id="a missing column",
        ),
        pytest.param(
            "arrival_s,input_tokens,output_tokens\nnan,1,1\n", "must be a finite number of seconds", id="NaN"
        ),
        pytest.param(
            "arrival_s,input_tokens,output_tokens\n0,-1,1\n",
            "must be at least 1 token",
            id="a negative length",
        ),
        pytest.param(
            "arrival_s,input_tokens,output_tokens\n2,1,1\n1,1,1\n",
            "must not be earlier than the request before",
            id="unsorted times",
        ),
    ],
)
def test_a_recording_that_breaks_a_rule_is_refused(
    refused: Cli, tmp_path: Path, rows: str, expected: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(rows)
    message = refused("play", "--headless", "--trace", str(path))
    assert message.startswith(str(path))
    assert message.endswith(expected)


def test_control_characters_of_a_file_do_not_reach_the_terminal(refused: Cli, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n\x1b[31mred\a,1,1\n")
    message = refused("play", "--headless", "--trace", str(path))
    assert message == f"{path}:2 arrival_s (\\x1b[31mred\\x07) must be a finite number of seconds"


def test_a_result_must_not_replace_the_trace(refused: Cli, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    message = refused("play", "--headless", "--trace", str(path), "--json", str(path))
    assert message == f"--json ({path}) must be another file than --trace"


@pytest.mark.parametrize("command", [("up", "--local", "-f"), ("play", "-f"), ("play", "--trace")])
def test_a_missing_file_is_named(refused: Cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "nowhere"
    assert refused(*command, str(path)) == f"{path} (missing) must be a file that exists"


def test_a_port_in_use_is_named_and_nothing_is_left_behind(refused: Cli, tmp_path: Path) -> None:
    path = manifest(tmp_path, ["instances: 1"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port ({port})" in refused("up", "--local", "-f", str(path), "--port", str(port))
        assert f"port ({port})" in refused("play", "--headless", "--port", str(port))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("play", "--load", "flat"),
            "--load (flat) is not one of moving, steady, bursty, tiers, tiers-flood",
        ),
        (("play", "--mode", "on"), "--mode (on) is not one of Off, Advise, Auto"),
        (("play", "--for", "60"), "--for (60) has no unit: write 60s, 60m or 60ms"),
        (("play", "--for", "0s"), "--for (0s) must be longer than 0s"),
        (("play", "--kill-every", "x"), "--kill-every (x) is not a duration such as 1s, 50ms or 1h30m"),
        (("play", "--speed", "0"), "--speed (0.0) must be a number above 0"),
        (("play", "--speed", "nan"), "--speed (nan) must be a number above 0"),
        (("play", "--scale", "-1"), "--scale (-1.0) must be a number above 0"),
        (("play", "--speed", "2"), "--speed, --scale (no --trace) need a trace: pass one with --trace"),
        (("play", "--flips", "-1"), "--flips (-1) must not be negative"),
        (("play", "--port", "70000"), "--port (70000) must be between 0 and 65535"),
        (("play", "--json", "/nowhere/at/all"), "--json (/nowhere/at/all) must be in a folder that exists"),
        (("up", "-f", "x"), "--local (not given) is required: `up` starts local services only"),
        (("up", "--local"), "--file (not given) is required without --engine vllm-cpu"),
        (("up", "--local", "--engine", "x"), "--engine (x) is not one of simulated, vllm-cpu"),
        (
            ("flip", "chat-0", "--to", "Decode", "--pin", "10"),
            "--pin (10) has no unit: write 10s, 10m or 10ms",
        ),
        (("flip", "chat-0", "--to", "Both"), "--to (Both) is not one of Prefill, Decode"),
        (("explain", "--limit", "0"), "--limit (0) must be at least 1"),
        (("play", "--json", "/"), "--json (/) must be a file, not a folder"),
        (("play", "--snapshot", ""), "--snapshot (.) must be a file, not a folder"),
        (
            ("play", "--load", "steady", "--trace", "x.csv"),
            "--load (steady) cannot be combined with --trace: a trace has its own shape",
        ),
        (
            ("web", "--replay", "nosuch"),
            "--replay (nosuch) cannot be read: No such file or directory",
        ),
        (("web", "--replay", "x", "chat"), "SERVICE (chat) cannot be combined with --replay"),
        (("web", "--replay", "x", "-n", "a"), "--namespace (a) cannot be combined with --replay"),
        (("web", "--replay", "x", "--record", "y"), "--record (y) cannot be combined with --replay"),
        (("regret", "--file", "nosuch"), "--file (nosuch) cannot be read: No such file or directory"),
        (("regret", "--file", "x", "chat"), "SERVICE (chat) cannot be combined with --file"),
        (("regret", "--file", "x", "--save", "x"), "--save (x) must be another file than --file"),
        (("status",), NO_TARGET_FOUND),
        (("flip", "chat-0", "--to", "decode"), NO_TARGET_FOUND),
        (("drain", "chat-0", "--undo"), NO_TARGET_FOUND),
        (
            ("drain", "chat-0", "--wait", "--undo"),
            "--wait (given) cannot be combined with --undo",
        ),
        (("explain",), NO_TARGET_FOUND),
        (("doctor", "-o", "table"), "--output (table) is not one of json, yaml"),
        (("status", "-o", "wide"), "--output (wide) is not one of json, yaml"),
        (("fly",), "No such command 'fly'."),
        (("flip", "chat-0"), "Missing option '--to'."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_option_that_breaks_a_rule_is_refused(
    refused: Cli, arguments: tuple[str, ...], expected: str
) -> None:
    assert refused(*arguments) == expected


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([])
    out = capsys.readouterr().out
    assert exited.value.code == 0
    assert all(command in out for command in ("play", "up", "status", "flip", "drain", "explain", "doctor"))


def test_real_engines_without_their_environment_are_refused_with_the_command_that_makes_it(
    refused: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULCRUM_ENGINE", "/nowhere")
    rule = (
        "spec.engine.type (vLLM) needs the engine environment on this machine; install it with `make engine`"
    )
    assert refused("up", "--local", "--engine", "vllm-cpu") == rule
