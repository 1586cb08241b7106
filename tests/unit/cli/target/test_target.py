"""What a command speaks to is decided by one rule, and what cannot be spoken to is said in one line."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from fulcrum_cli.local import RunInfo
from fulcrum_cli.local.run_folder import run_folder, write_info
from fulcrum_cli.target.connection import find_run
from fulcrum_cli.target.kubeconfig import read_context
from fulcrum_cli.target.target import Asked, ClusterTarget, LocalTarget, choose_target
from fulcrum_cli.terminal.program import program_name
from fulcrum_core.errors import InvalidInput


def run_info(
    service: str, *, folder: Path = Path("/run"), started_at_s: float = 0.0, pid: int = 1
) -> RunInfo:
    return RunInfo(
        pid=pid, started_at_s=started_at_s, service=service, namespace="default", run_dir=str(folder),
        store="unix:/s", token_file="/t", router_url="http://r", router_state_url="http://s",
        autoscaler_url="http://a",
    )  # fmt: skip


def kubeconfig(path: Path, *names: str, current: str | None = None) -> Path:
    """A kubeconfig with one context and one cluster a name; `NAME-ns` is the context's namespace."""
    document = {
        "current-context": current,
        "contexts": [{"name": n, "context": {"cluster": n, "namespace": f"{n}-ns"}} for n in names],
        "clusters": [{"name": n, "cluster": {"server": f"https://{n}.example"}} for n in names],
    }
    path.write_text(json.dumps(document))
    return path


def of_cluster(name: str, *, store: str, namespace: str = "") -> ClusterTarget:
    return ClusterTarget(
        store=store, namespace=namespace or f"{name}-ns", context=f"context {name}",
        server=f"https://{name}.example",
    )  # fmt: skip


@pytest.mark.parametrize("runs", [True, False], ids=["a local run is up", "no local run is up"])
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"kubeconfig": True}, id="kubeconfig"),
        pytest.param({"context": "b"}, id="context"),
        pytest.param({"namespace": "n"}, id="namespace"),
        pytest.param({"program": "kubectl fulcrum"}, id="as kubectl's plugin"),
        pytest.param({}, id="nothing"),
    ],
)
def test_options_go_before_a_local_run_and_that_before_the_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Mapping[str, str], runs: bool
) -> None:
    file = kubeconfig(tmp_path / "config", "a", "b", current="a")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    wanted = dataclasses.replace(
        Asked(),
        **{**asked, **({"kubeconfig": file} if "kubeconfig" in asked else {})},  # type: ignore[arg-type]
    )
    environment = {"KUBECONFIG": str(file)}
    expected = {
        "kubeconfig": of_cluster("a", store=f"kubeconfig:{file}"),
        "context": of_cluster("b", store="kubeconfig:#b"),
        "namespace": of_cluster("a", store="kubeconfig:", namespace="n"),
        "program": of_cluster("a", store="kubeconfig:"),
    }
    with run_folder(None, service="chat") as folder:
        info = run_info("chat", folder=folder, pid=os.getpid())
        if runs:
            write_info(info)
        target = choose_target(wanted, environment)
    by_default = LocalTarget((info,)) if runs else of_cluster("a", store="kubeconfig:")
    assert target == (expected[next(iter(asked))] if asked else by_default)


def test_in_a_pod_without_a_kubeconfig_it_is_the_cluster_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    environment = {"KUBECONFIG": "/nowhere", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    target = choose_target(Asked(), environment)
    assert isinstance(target, ClusterTarget)
    assert (target.store, target.namespace) == ("in-cluster", "default")


@pytest.mark.parametrize(
    ("text", "context", "expected"),
    [
        pytest.param("[", None, "is not YAML", id="no YAML"),
        pytest.param("[]", None, "is no kubeconfig", id="no mapping"),
        pytest.param("{}", None, "has no current context: choose one with --context", id="empty"),
        pytest.param("{}", "x", "--context (x) is not a context of", id="no such context"),
        pytest.param("current-context: x", None, "current-context (x) is not a context of", id="dangling"),
        pytest.param(
            "contexts: [{name: x, context: {cluster: y}}]", "x", "context x (y) names no cluster of it",
            id="a context without its cluster",
        ),
    ],
)  # fmt: skip
def test_a_kubeconfig_that_means_no_cluster_is_named(
    tmp_path: Path, text: str, context: str | None, expected: str
) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_context([path], context)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_of_several_files_the_first_word_counts(tmp_path: Path) -> None:
    one = kubeconfig(tmp_path / "one", "a")
    two = kubeconfig(tmp_path / "two", "b", current="b")
    assert read_context([one, two], None).name == "b"
    assert read_context([one, two], "a").server == "https://a.example"


RUNS = LocalTarget((run_info("chat", started_at_s=2.0), run_info("code-gen"), run_info("chat", pid=7)))


@pytest.mark.parametrize(
    ("name", "instance", "found"),
    [
        pytest.param("chat", None, RUNS.runs[0], id="the latest of that name"),
        pytest.param(None, "code-gen-3", RUNS.runs[1], id="by the name of an instance"),
    ],
)
def test_the_run_is_found_by_name(name: str | None, instance: str | None, found: RunInfo) -> None:
    assert find_run(RUNS, name, of_instance=instance) == found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(None, "SERVICE (chat, code-gen) are running: name one", id="several, none named"),
        pytest.param(
            "api",
            "SERVICE (api) does not run on this machine; running: chat, code-gen; "
            "--context or -n means a cluster",
            id="none of that name",
        ),
    ],
)
def test_a_run_that_is_not_plain_is_asked_for(name: str | None, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        find_run(RUNS, name)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        ("/usr/bin/fulcrum", "fulcrum"),
        ("/x/__main__.py", "fulcrum"),
        ("/usr/bin/kubectl-fulcrum", "kubectl fulcrum"),
    ],
)
def test_the_program_knows_how_it_was_called(called: str, expected: str) -> None:
    assert program_name(called) == expected
