"""Options of the router, and the error line of each invalid combination."""

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
        metrics_port=0,
        log_level="info",
        token="secret",
        state_callers=(),
        store="unix:/s",
        static=(),
    )


OPERATOR = "system:serviceaccount:fulcrum:operator"
IN_POD = (
    *("--service", "chat", "--namespace", "prod", "--store", "in-cluster", "--host", "0.0.0.0"),
    *("--port", "8000", "--state-port", "9091", "--metrics-port", "9094", "--lease", "chat-router"),
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
        metrics_port=9094,
        log_level="info",
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
            [],
            "--store (not given) is required, unless --static is given",
            id="neither store nor static endpoints",
        ),
        pytest.param(
            ["--store", "unix:/s", "--static", "decode=a:1"],
            "--store (unix:/s) cannot be combined with --static",
            id="store and static endpoints",
        ),
        pytest.param(
            ["--store", "unix:/s"],
            "--token-file (not given) or --state-callers is required with --store",
            id="neither token nor callers",
        ),
        pytest.param(
            [*IN_POD, "--token-file", "/t"],
            "--token-file (/t) cannot be combined with --state-callers",
            id="token and callers",
        ),
        pytest.param(
            [*IN_POD, "--state-callers", "operator"],
            "--state-callers (operator) is not system:serviceaccount:NAMESPACE:NAME",
            id="caller that is not a ServiceAccount",
        ),
        pytest.param(
            [*IN_POD, "--advertise-address", "chat-0"],
            "--advertise-address (chat-0) is not an IP address",
            id="host name as address",
        ),
        pytest.param(
            [*IN_POD[:-4], "--advertise-address", "10.0.0.7"],
            "--identity (not given) is required with --lease",
            id="lease without an identity",
        ),
        pytest.param(
            ["--store", "in-cluster", "--state-callers", OPERATOR, "--identity", "chat-router-x7"],
            "--identity (chat-router-x7) is valid with --lease only",
            id="identity without a lease",
        ),
        pytest.param(
            ["--store", "unix:/s", "--token-file", "/t", "--lease", "x"],
            "--lease (x) is valid in a cluster only",
            id="lease in a local run",
        ),
        pytest.param(["--static", "x=a:1"], "--static (x=a:1) is not prefill=", id="unknown role"),
        pytest.param(["--static", "decode=a"], "--static (a) is not HOST:PORT", id="endpoint without a port"),
        pytest.param(
            ["--static", "decode=a:1", "--port", "70000"],
            "--port (70000) is not between 0 and 65535",
            id="port out of range",
        ),
        pytest.param(
            ["--static", "decode=a:1", "--tls-certificate", "/c"],
            "--tls-key (not given) is required with the other option for TLS",
            id="certificate without a key",
        ),
        pytest.param(
            ["--static", "decode=a:1", "--state-tls-key", "/k"],
            "--state-tls-certificate (not given) is required with the other option for TLS",
            id="key of the state port without a certificate",
        ),
        pytest.param(
            ["--store", "unix:/s", "--token-file", "/nowhere/token"],
            "--token-file (/nowhere/token) cannot be read: no such file or directory",
            id="missing token file",
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
