"""The target of a command: cluster options, then a local run, then the kubeconfig; and why one is refused."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from fulcrum_cli.local.run_folder import RunInfo, open_run_folder, write_info
from fulcrum_cli.program_name import program_name
from fulcrum_cli.target.connection import find_run
from fulcrum_cli.target.kubeconfig import read_context
from fulcrum_cli.target.selection import ClusterTarget, LocalTarget, TargetOptions, choose_target
from fulcrum_core.errors import InvalidInput


def run_info(
    service: str, *, folder: Path = Path("/run"), started_at_s: float = 0.0, pid: int = 1
) -> RunInfo:
    return RunInfo(
        pid=pid, started_at_s=started_at_s, service=service, namespace="default", run_dir=str(folder),
        store_address="unix:/s", token_file="/t", router_url="http://r", router_state_url="http://s",
        autoscaler_url="http://a",
        router_metrics_url="",
    )  # fmt: skip


def write_kubeconfig(path: Path, *names: str, current: str | None = None) -> Path:
    """Write a kubeconfig with a context and a cluster for each name; the namespace is `NAME-ns`."""
    document = {
        "current-context": current,
        "contexts": [{"name": n, "context": {"cluster": n, "namespace": f"{n}-ns"}} for n in names],
        "clusters": [{"name": n, "cluster": {"server": f"https://{n}.example"}} for n in names],
    }
    path.write_text(json.dumps(document))
    return path


def cluster_target(name: str, *, store_address: str, namespace: str = "") -> ClusterTarget:
    return ClusterTarget(
        store_address=store_address, namespace=namespace or f"{name}-ns", context=f"context {name}",
        server=f"https://{name}.example",
    )  # fmt: skip


@pytest.mark.parametrize("runs", [True, False], ids=["a local run is up", "no local run is up"])
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"kubeconfig": True}, id="kubeconfig"),
        pytest.param({"context": "b"}, id="context"),
        pytest.param({"namespace": "n"}, id="namespace"),
        pytest.param({"program": "kubectl fulcrum"}, id="as kubectl's plugin"),
        pytest.param({}, id="nothing"),
    ],
)
def test_cluster_options_win_over_a_local_run_which_wins_over_the_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Mapping[str, str], runs: bool
) -> None:
    file = write_kubeconfig(tmp_path / "config", "a", "b", current="a")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = dataclasses.replace(
        TargetOptions(),
        **{**given, **({"kubeconfig": file} if "kubeconfig" in given else {})},  # type: ignore[arg-type]
    )
    environment = {"KUBECONFIG": str(file)}
    expected = {
        "kubeconfig": cluster_target("a", store_address=f"kubeconfig:{file}"),
        "context": cluster_target("b", store_address="kubeconfig:#b"),
        "namespace": cluster_target("a", store_address="kubeconfig:", namespace="n"),
        "program": cluster_target("a", store_address="kubeconfig:"),
    }
    with open_run_folder(None, service="chat") as folder:
        info = run_info("chat", folder=folder, pid=os.getpid())
        if runs:
            write_info(info)
        target = choose_target(options, environment)
    by_default = LocalTarget((info,)) if runs else cluster_target("a", store_address="kubeconfig:")
    assert target == (expected[next(iter(given))] if given else by_default)


def test_inside_a_pod_the_target_is_its_own_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    environment = {"KUBECONFIG": "/nowhere", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    target = choose_target(TargetOptions(), environment)
    assert isinstance(target, ClusterTarget)
    assert (target.store_address, target.namespace) == ("in-cluster", "default")


@pytest.mark.parametrize(
    ("text", "context", "expected"),
    [
        pytest.param("[", None, "is not YAML", id="no YAML"),
        pytest.param("[]", None, "is not a kubeconfig", id="no mapping"),
        pytest.param("{}", None, "has no current context: select one with --context", id="empty"),
        pytest.param("{}", "x", "--context (x) is not a context of", id="no such context"),
        pytest.param("current-context: x", None, "current-context (x) is not a context of", id="dangling"),
        pytest.param(
            "contexts: [{name: x, context: {cluster: y}}]", "x",
            "cluster of context x (y) is not a cluster of this file",
            id="a context without its cluster",
        ),
    ],
)  # fmt: skip
def test_a_kubeconfig_without_a_usable_context_is_refused_with_its_path(
    tmp_path: Path, text: str, context: str | None, expected: str
) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_context([path], context)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_first_of_several_kubeconfig_files_wins(tmp_path: Path) -> None:
    one = write_kubeconfig(tmp_path / "one", "a")
    two = write_kubeconfig(tmp_path / "two", "b", current="b")
    assert read_context([one, two], None).name == "b"
    assert read_context([one, two], "a").server == "https://a.example"
    other = json.loads(one.read_text().replace("https://a", "https://other"))
    two.write_text(json.dumps({**other, "current-context": "b"}))
    one.write_text(json.dumps({**json.loads(one.read_text()), "current-context": "a"}))
    assert read_context([one, two], None).server == "https://a.example"
    assert read_context([two, one], "a").server == "https://other.example"


RUNS = LocalTarget((run_info("chat", started_at_s=2.0), run_info("code-gen"), run_info("chat", pid=7)))


def test_the_latest_local_run_of_a_service_is_found_by_name() -> None:
    assert find_run(RUNS, "chat") == RUNS.runs[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(
            None, "SERVICE (chat, code-gen) are running: name one of them", id="several services and no name"
        ),
        pytest.param(
            "api",
            "SERVICE (api) does not run on this machine; running: chat, code-gen; "
            "use --context or -n for a cluster",
            id="no service of that name",
        ),
    ],
)
def test_an_ambiguous_or_unknown_service_is_refused(name: str | None, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        find_run(RUNS, name)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("argv0", "expected"),
    [
        ("/usr/bin/fulcrum", "fulcrum"),
        ("/x/__main__.py", "fulcrum"),
        ("/usr/bin/kubectl-fulcrum", "kubectl fulcrum"),
    ],
)
def test_the_program_name_follows_argv0(argv0: str, expected: str) -> None:
    assert program_name(argv0) == expected
