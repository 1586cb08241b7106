"""What a router may be started with, and the one line that says what is wrong."""

from pathlib import Path

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import Role
from fulcrum_router.options import RouterOptions, parse_options


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret\n")
    return path


def test_a_local_router_takes_a_store_and_a_token_file(token: Path) -> None:
    given = ["--service", "chat", "--store", "unix:/s", "--token-file", str(token), "--port", "8000"]
    assert parse_options(given) == RouterOptions(
        service="chat",
        namespace="default",
        host="127.0.0.1",
        port=8000,
        state_port=0,
        token="secret",
        state_callers=(),
        store="unix:/s",
        static=(),
    )


IN_POD = (
    *("--service", "chat", "--namespace", "prod", "--store", "in-cluster", "--host", "0.0.0.0"),
    *("--port", "8000", "--state-port", "9091", "--lease", "chat-router"),
    *("--state-callers", "system:serviceaccount:fulcrum:operator,system:serviceaccount:fulcrum:autoscaler"),
    *("--identity", "chat-router-x7", "--advertise-address", "10.0.0.7"),
)


def test_a_router_in_a_pod_takes_a_lease_and_state_callers() -> None:
    options = parse_options(IN_POD)
    assert options == RouterOptions(
        service="chat",
        namespace="prod",
        host="0.0.0.0",
        port=8000,
        state_port=9091,
        token=None,
        state_callers=(
            "system:serviceaccount:fulcrum:operator",
            "system:serviceaccount:fulcrum:autoscaler",
        ),
        store="in-cluster",
        static=(),
        lease="chat-router",
        identity="chat-router-x7",
        advertise_address="10.0.0.7",
    )
    assert options.has_state_port


def test_static_endpoints_are_listed_with_their_roles() -> None:
    options = parse_options(["--static", "prefill=a:1,b:2", "decode=[::1]:3"])
    expected = ((Role.PREFILL, "a", 1), (Role.PREFILL, "b", 2), (Role.DECODE, "::1", 3))
    assert (options.static, options.token) == (expected, None)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            [], "--store (nothing) is required, unless --static is given in its place", id="neither"
        ),
        pytest.param(
            ["--store", "unix:/s"],
            "--token-file (nothing) or --state-callers, one of them, is required with --store",
            id="no token",
        ),
        pytest.param(
            [*IN_POD, "--token-file", "/t"],
            "--token-file (both) or --state-callers, one of them, is required",
            id="a token and callers",
        ),
        pytest.param(
            [*IN_POD, "--state-callers", "operator"],
            "--state-callers (operator) is not system:serviceaccount:NAMESPACE:NAME",
            id="a caller that is no account",
        ),
        pytest.param(
            [*IN_POD, "--advertise-address", "chat-0"],
            "--advertise-address (chat-0) is not an IP address",
            id="a name",
        ),
        pytest.param(
            [*IN_POD[:-4], "--advertise-address", "10.0.0.7"],
            "--identity (nothing) and --lease go together",
            id="a lease of nobody",
        ),
        pytest.param(
            ["--store", "unix:/s", "--token-file", "/t", "--lease", "x"],
            "--lease (x) has a meaning in a cluster only",
            id="a lease in a local run",
        ),
        pytest.param(["--static", "x=a:1"], "--static (x=a:1) is not prefill=", id="another role"),
        pytest.param(["--static", "decode=a"], "--static (a) is not HOST:PORT", id="no port"),
        pytest.param(
            ["--static", "decode=a:1", "--port", "70000"],
            "--port (70000) is not between 0 and 65535",
            id="a port that is none",
        ),
        pytest.param(
            ["--store", "unix:/s", "--token-file", "/nowhere/token"],
            "--token-file (/nowhere/token) cannot be read: no such file or directory",
            id="no such file",
        ),
    ],
)
def test_bad_arguments_raise_one_line_that_names_the_option(arguments: list[str], line: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_options(arguments)
    assert str(caught.value).startswith(line)


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "token"
    empty.write_text("\n")
    with pytest.raises(InvalidInput, match="is empty"):
        parse_options(["--store", "unix:/s", "--token-file", str(empty)])
