"""Where `--store` leads, and what a user is told whose address leads nowhere."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from fulcrum_cluster.access import AccountToken, find_access, pod_access
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
    """What a kubelet mounts for a ServiceAccount."""
    (folder / "token").write_text("first\n", encoding="utf-8")
    (folder / "namespace").write_text("team", encoding="utf-8")
    return folder


def test_a_socket_is_reached_without_tls_or_token() -> None:
    access = find_access("unix:/run/store.sock")
    assert (access.socket, access.tls, access.token) == (Path("/run/store.sock"), None, None)


@pytest.mark.parametrize(
    ("context", "expected"),
    [("", ("http://one:8080", "default")), ("#second", ("http://two:8080", "team"))],
    ids=["the current context", "a context by name"],
)
async def test_a_kubeconfig_gives_address_namespace_and_token(
    tmp_path: Path, context: str, expected: tuple[str, str]
) -> None:
    access = find_access(f"kubeconfig:{kubeconfig(tmp_path, token='secret')}{context}")
    assert (access.url, access.namespace) == expected
    assert access.token is not None
    assert await access.token.header() == "Bearer secret"


def test_no_key_of_a_kubeconfig_stays_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    root = pki.authority("test")
    path = tmp_path / "config"
    path.write_text(pki.kubeconfig(root, pki.issue(root, "admin"), "https://one:6443"), encoding="utf-8")
    for _ in range(2):  # the library remembers what it wrote
        access = find_access(f"kubeconfig:{path}")
        assert access.tls is not None
        assert len(access.tls.get_ca_certs()) == 1
        assert list((tmp_path / "temporary").iterdir()) == []


async def test_an_exec_plugin_is_asked_for_the_token(tmp_path: Path) -> None:
    version = "client.authentication.k8s.io/v1"
    said = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "t"}}
    plugin = {
        "apiVersion": version,
        "command": "/bin/echo",
        "args": [json.dumps(said)],
        "interactiveMode": "Never",
    }
    access = find_access(f"kubeconfig:{kubeconfig(tmp_path, exec=plugin)}")
    assert access.token is not None
    assert await access.token.header() == "Bearer t"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        pytest.param(None, "cannot be read as a kubeconfig: ", id="no such file"),
        pytest.param("", "cannot be read as a kubeconfig: ", id="nothing in it"),
        pytest.param("a: [", "cannot be read as a kubeconfig: ", id="no YAML"),
        pytest.param("kind: Config\n", "cannot be read as a kubeconfig: ", id="no contexts"),
        pytest.param("[]\n", "cannot be read as a kubeconfig: ", id="a list"),
    ],
)
def test_a_bad_kubeconfig_is_one_clear_line(tmp_path: Path, text: str | None, rule: str) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput) as refused:
        find_access(f"kubeconfig:{path}")
    assert str(refused.value).startswith(f"--store (kubeconfig:{path}) {rule}")
    assert "\n" not in str(refused.value)


def test_a_context_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="third"):
        find_access(f"kubeconfig:{kubeconfig(tmp_path)}#third")


def test_an_exec_plugin_that_is_not_there_is_told(tmp_path: Path) -> None:
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-plugin"}
    with pytest.raises(InvalidInput, match=r"gives no credentials: .*no-such-plugin"):
        find_access(f"kubeconfig:{kubeconfig(tmp_path, exec=plugin)}")


@pytest.mark.parametrize("address", ["", "unix:", "kubeconfig", "/run/store.sock", "http://localhost"])
def test_an_address_of_no_known_form_is_told_the_forms(address: str) -> None:
    with pytest.raises(InvalidInput, match=r"nor kubeconfig:\[PATH\]\[#CONTEXT\], nor in-cluster"):
        find_access(address)


def test_outside_of_a_pod_in_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="KUBERNETES_SERVICE_HOST is not set"):
        pod_access(folder=account(tmp_path), environment={})


def test_a_pod_without_a_mounted_account_is_told_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"needs a mounted ServiceAccount: .*token: No such file"):
        pod_access(folder=tmp_path, environment=POD)


def test_a_pod_trusts_the_clusters_own_authority_alone(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ca\.crt"):
        pod_access(folder=account(tmp_path), environment=POD)
    authority = tmp_path / "ca.crt"
    authority.write_text("no certificate", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"ca\.crt"):
        pod_access(folder=tmp_path, environment=POD)


async def test_a_token_is_read_again_after_a_minute_and_after_a_refusal(tmp_path: Path) -> None:
    now = [100.0]
    token = AccountToken(account(tmp_path) / "token", monotonic_s=lambda: now[0])
    seen = [await token.header()]
    (tmp_path / "token").write_text("second", encoding="utf-8")
    seen.append(await token.header())
    now[0] += 60.0
    seen.append(await token.header())
    (tmp_path / "token").write_text("third", encoding="utf-8")
    token.refused()
    seen.append(await token.header())
    assert seen == ["Bearer first", "Bearer first", "Bearer second", "Bearer third"]


def test_a_pod_does_not_load_the_kubernetes_library() -> None:
    code = "import sys, fulcrum_cluster.client; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
