"""The autoscaler's command-line options: defaults, and what each refusal says."""

from pathlib import Path

import pytest

from fulcrum_autoscaler.options import IN_CLUSTER_ROUTER_STATE_URL, Options, parse_options
from fulcrum_core.errors import InvalidInput


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("secret")
    return str(path)


def test_in_a_cluster_only_store_and_token_file_are_required(token: str) -> None:
    options = parse_options(["--store", "in-cluster", "--token-file", token])
    assert options == Options(
        service=None,
        namespace="",
        store="in-cluster",
        router_state=IN_CLUSTER_ROUTER_STATE_URL,
        token_file=Path(token),
        state_ca=None,
        host="127.0.0.1",
        port=0,
        log_level="info",
    )
    assert options.router_url("prod", "chat") == "http://chat.prod.svc:9091"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            ["--store", "unix:/s"],
            "--router-state (nothing) is required in a local run",
            id="local run without a router URL",
        ),
        pytest.param(
            ["--store", "in-cluster", "--router-state", "http://chat:9091"],
            "--router-state (http://chat:9091) names one router for all services",
            id="one router URL for all services",
        ),
        pytest.param(
            ["--store", "in-cluster", "--router-state", "ftp://{service}"],
            "--router-state (ftp://{service}) is not http://HOST:PORT",
            id="another scheme",
        ),
        pytest.param(
            ["--store", "in-cluster", "--router-state", "http://{service}:port"],
            "--router-state (http://{service}:port) is not http://HOST:PORT",
            id="a port that is not a number",
        ),
    ],
)
def test_bad_arguments_are_refused_with_option_value_and_rule(
    token: str, arguments: list[str], line: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_options([*arguments, "--token-file", token])
    assert str(caught.value).startswith(line)
