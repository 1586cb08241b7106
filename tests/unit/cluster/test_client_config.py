"""Client configurations from `--store` addresses, and the messages for wrong addresses."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from fulcrum_cluster.client import resolve_client_config
from fulcrum_cluster.client_config import ServiceAccountToken, in_cluster_config
from fulcrum_core.errors import InvalidInput
from tools.kubernetes import pki

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def kubeconfig(folder: Path, **user: Any) -> Path:
    """Two clusters, without TLS; the second context has a namespace."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "first",
        "clusters": [
            {"name": "one", "cluster": {"server": "http://one:8080"}},
            {"name": "two", "cluster": {"server": "http://two:8080"}},
        ],
        "users": [{"name": "me", "user": user}],
        "contexts": [
            {"name": "first", "context": {"cluster": "one", "user": "me"}},
            {"name": "second", "context": {"cluster": "two", "user": "me", "namespace": "team"}},
        ],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def account(folder: Path) -> Path:
    """Write the files that a kubelet mounts for a ServiceAccount."""
    (folder / "token").write_text("first\n", encoding="utf-8")
    (folder / "namespace").write_text("team", encoding="utf-8")
    return folder


def test_socket_config_has_no_tls_and_no_token() -> None:
    config = resolve_client_config("unix:/run/store.sock")
    assert (config.socket, config.tls, config.token) == (Path("/run/store.sock"), None, None)


@pytest.mark.parametrize(
    ("context", "expected"),
    [("", ("http://one:8080", "default")), ("#second", ("http://two:8080", "team"))],
    ids=["the current context", "a context by name"],
)
async def test_kubeconfig_sets_address_namespace_and_token(
    tmp_path: Path, context: str, expected: tuple[str, str]
) -> None:
    config = resolve_client_config(f"kubeconfig:{kubeconfig(tmp_path, token='secret')}{context}")
    assert (config.url, config.namespace) == expected
    assert config.token is not None
    assert await config.token.authorization_header() == "Bearer secret"


def test_inline_kubeconfig_keys_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    root = pki.create_authority("test")
    path = tmp_path / "config"
    path.write_text(
        pki.build_kubeconfig(root, pki.issue_certificate(root, "admin"), "https://one:6443"), encoding="utf-8"
    )
    for _ in range(2):  # the library caches the files that it wrote
        config = resolve_client_config(f"kubeconfig:{path}")
        assert config.tls is not None
        assert len(config.tls.get_ca_certs()) == 1
        assert list((tmp_path / "temporary").iterdir()) == []


async def test_token_comes_from_the_exec_plugin(tmp_path: Path) -> None:
    version = "client.authentication.k8s.io/v1"
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "t"}}
    plugin = {
        "apiVersion": version,
        "command": "/bin/echo",
        "args": [json.dumps(credential)],
        "interactiveMode": "Never",
    }
    config = resolve_client_config(f"kubeconfig:{kubeconfig(tmp_path, exec=plugin)}")
    assert config.token is not None
    assert await config.token.authorization_header() == "Bearer t"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        pytest.param(None, "cannot be read as a kubeconfig: ", id="missing file"),
        pytest.param("", "cannot be read as a kubeconfig: ", id="empty"),
        pytest.param("a: [", "cannot be read as a kubeconfig: ", id="not YAML"),
        pytest.param("kind: Config\n", "cannot be read as a kubeconfig: ", id="no contexts"),
        pytest.param("[]\n", "cannot be read as a kubeconfig: ", id="a list"),
    ],
)
def test_unreadable_kubeconfig_is_refused_in_one_line(tmp_path: Path, text: str | None, rule: str) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput) as refused:
        resolve_client_config(f"kubeconfig:{path}")
    assert str(refused.value).startswith(f"--store (kubeconfig:{path}) {rule}")
    assert "\n" not in str(refused.value)


def test_missing_context_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="third"):
        resolve_client_config(f"kubeconfig:{kubeconfig(tmp_path)}#third")


def test_missing_exec_plugin_is_named_in_the_error(tmp_path: Path) -> None:
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-plugin"}
    with pytest.raises(InvalidInput, match=r"returns no credentials: .*no-such-plugin"):
        resolve_client_config(f"kubeconfig:{kubeconfig(tmp_path, exec=plugin)}")


@pytest.mark.parametrize("address", ["", "unix:", "kubeconfig", "/run/store.sock", "http://localhost"])
def test_unknown_address_form_is_refused_with_the_known_forms(address: str) -> None:
    with pytest.raises(InvalidInput, match=r"nor kubeconfig:\[PATH\]\[#CONTEXT\], nor in-cluster"):
        resolve_client_config(address)


def test_in_cluster_address_outside_a_pod_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="KUBERNETES_SERVICE_HOST is not set"):
        in_cluster_config(folder=account(tmp_path), environment={})


def test_missing_service_account_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"needs a mounted ServiceAccount: .*token: No such file"):
        in_cluster_config(folder=tmp_path, environment=POD)


def test_missing_or_invalid_cluster_ca_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ca\.crt"):
        in_cluster_config(folder=account(tmp_path), environment=POD)
    authority = tmp_path / "ca.crt"
    authority.write_text("no certificate", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"ca\.crt"):
        in_cluster_config(folder=tmp_path, environment=POD)


async def test_token_is_read_again_after_a_minute_and_after_a_refusal(tmp_path: Path) -> None:
    now = [100.0]
    token = ServiceAccountToken(account(tmp_path) / "token", monotonic_s=lambda: now[0])
    seen = [await token.authorization_header()]
    (tmp_path / "token").write_text("second", encoding="utf-8")
    seen.append(await token.authorization_header())
    now[0] += 60.0
    seen.append(await token.authorization_header())
    (tmp_path / "token").write_text("third", encoding="utf-8")
    token.invalidate()
    seen.append(await token.authorization_header())
    assert seen == ["Bearer first", "Bearer first", "Bearer second", "Bearer third"]


def test_in_cluster_client_does_not_load_the_kubernetes_library() -> None:
    code = "import sys, fulcrum_cluster.client; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
