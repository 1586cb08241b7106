"""`fulcrum status|flip|drain|explain` on a real API server; the test writes what an operator would."""

import asyncio
import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.assignment.writes import flip_instance
from fulcrum_cluster.client import open_store
from fulcrum_core.values import Role
from tests.kubernetes.control_plane.cli_service import CommandLine, Service, create_objects
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.program import ensure_program
from tools.kubernetes.waiting import wait_for

ROLES = {"chat-0": "Prefill", "chat-1": "Decode", "chat-2": "Decode"}


@pytest.fixture
def fulcrum(control_plane: Cluster, namespace: str, tmp_path: Path) -> CommandLine:
    return CommandLine(control_plane.kubeconfig, tmp_path, namespace)


@pytest.fixture
def chat(control_plane: Cluster, namespace: str) -> Service:
    return Service(control_plane, namespace, roles=ROLES)


def refusal_of(done: "subprocess.CompletedProcess[str]") -> str:
    """Expect exit code 2 and one line on standard error; return it without `error: `."""
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("error: ").rstrip("\n")


def stdout_of(done: "subprocess.CompletedProcess[str]") -> str:
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


# status


def test_status_shows_service_instances_and_target(fulcrum: CommandLine, chat: Service) -> None:
    condition = {"type": "Ready", "status": "True", "reason": "InstancesServing", "message": "3 of 3 serve"}
    chat.set_status(
        conditions=[condition], ready="3/3", ratio="1:2", endpoint="http://chat", observedGeneration=1
    )
    chat.set_instance_status("chat-2", role="Decode", phase="Draining")
    chat.patch_entry("chat-2", cordoned=True, cordonedBy="Person")
    chat.patch_entry("chat-0", by="Person", pinnedUntil="2999-01-01T00:00:00Z")
    lines = stdout_of(fulcrum("status")).splitlines()
    assert lines[1].split()[:7] == ["chat", "m", "vLLM", "3/3", "0", "0", "1:2"]
    rows = {line.split()[0]: line for line in lines if line.startswith("chat-")}
    assert {name: row.split()[1:3] for name, row in rows.items()} == {
        "chat-0": ["Serving", "Prefill"], "chat-1": ["Serving", "Decode"], "chat-2": ["Draining", "Decode"],
    }  # fmt: skip
    assert "Person, pinned for " in rows["chat-0"]
    assert "cordoned by Person" in rows["chat-2"]
    assert "Ready       True     InstancesServing   3 of 3 serve" in lines
    assert lines[-1].startswith("target context test (https://127.0.0.1:")
    assert lines[-1].endswith(f"namespace {fulcrum.namespace}")


def test_status_json_uses_the_field_names_of_the_crds(fulcrum: CommandLine, chat: Service) -> None:
    chat.set_status(ready="3/3")
    (service,) = json.loads(stdout_of(fulcrum("status", "chat", "-o", "json")))["services"]
    assert service["status"]["ready"] == "3/3"
    assert service["assignment"]["roles"]["chat-0"]["role"] == "Prefill"
    assert [i["status"]["phase"] for i in service["instances"]] == ["Serving"] * 3


def test_a_namespace_without_services_says_so(fulcrum: CommandLine) -> None:
    assert stdout_of(fulcrum("status")).startswith("no PDService\ntarget context test (")


def test_an_unknown_service_is_refused_with_the_known_names(fulcrum: CommandLine, chat: Service) -> None:
    assert chat
    message = refusal_of(fulcrum("status", "code"))
    assert message.startswith("SERVICE (code) is not a PDService of context test (https://127.0.0.1:")
    assert message.endswith("; it has chat")


# flip


def test_a_flip_waits_until_the_instance_serves_its_role(fulcrum: CommandLine, chat: Service) -> None:
    process = fulcrum.start("flip", "chat-1", "--to", "prefill", "--pin", "10m", "--wait")
    try:
        wait_for(lambda: chat.entry("chat-1")["role"] == "Prefill", "the flip", timeout_s=20)
        chat.set_instance_status("chat-1", role="Prefill")
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert out.startswith("chat-1 → Prefill, pinned for 10m: serves Prefill ")
    entry = chat.entry("chat-1")
    assert (entry["by"], entry["reason"]) == ("Person", "by command")
    managers = {field["manager"] for field in chat.assignment()["metadata"]["managedFields"]}
    assert "fulcrum-cli" in managers


def test_a_flip_that_is_refused_after_it_was_written_says_why(fulcrum: CommandLine, chat: Service) -> None:
    process = fulcrum.start("flip", "chat-1", "--to", "prefill", "--wait")
    try:
        wait_for(lambda: chat.entry("chat-1")["role"] == "Prefill", "the flip", timeout_s=20)
        refusal = {"role": "Prefill", "reason": "not drained after 120 s", "until": "2999-01-01T00:00:00Z"}
        chat.patch_entry("chat-1", role="Decode", refused=refusal)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, err) == (2, "error: chat-1 → Prefill was refused: not drained after 120 s\n")
    assert "refused chat-1 → Prefill: not drained after 120 s, for " in stdout_of(fulcrum("status"))


def test_a_flip_without_an_operator_is_reported_as_written(fulcrum: CommandLine, chat: Service) -> None:
    done = stdout_of(fulcrum("flip", "chat-1", "--to", "prefill"))
    assert done.startswith(
        "chat-1 → Prefill: written, but not in effect after 5 s, now Serving; see fulcrum status chat ("
    )
    assert chat.entry("chat-1")["role"] == "Prefill"


def test_a_flip_to_the_current_role_writes_nothing(fulcrum: CommandLine, chat: Service) -> None:
    before = chat.assignment()["metadata"]["resourceVersion"]
    done = stdout_of(fulcrum("flip", "chat-1", "--to", "decode"))
    assert done.startswith("chat-1 already has the role Decode: nothing written (context test (")
    assert chat.assignment()["metadata"]["resourceVersion"] == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ("flip", "chat-0", "--to", "decode"),
            "instance (chat-0) may not flip to Decode: 0 instances would serve Prefill, the floor is 1; "
            "leaving: chat-0; flip another instance to Prefill first",
            id="a flip below the floor",
        ),
        pytest.param(
            ("drain", "chat-0"),
            "instance (chat-0) may not be drained: 0 instances would serve Prefill, the floor is 1; "
            "leaving: chat-0; flip another instance to Prefill first",
            id="a drain below the floor",
        ),
        pytest.param(
            ("flip", "chat-9", "--to", "decode"),
            "; there are chat-0, chat-1, chat-2",
            id="an unknown instance",
        ),
    ],
)
def test_a_refused_change_is_not_written(
    fulcrum: CommandLine, chat: Service, arguments: tuple[str, ...], expected: str
) -> None:
    before = chat.assignment()["metadata"]["resourceVersion"]
    assert refusal_of(fulcrum(*arguments)).endswith(expected)
    assert chat.assignment()["metadata"]["resourceVersion"] == before


async def test_flips_of_several_people_at_once_are_all_made(control_plane: Cluster, namespace: str) -> None:
    """Only one write of a resourceVersion succeeds; the other clients read, check and write again."""
    roles = {f"chat-{number}": "Decode" if number else "Prefill" for number in range(7)}
    chat = Service(control_plane, namespace, roles=roles)
    address = f"kubeconfig:{control_plane.kubeconfig}"
    names = [name for name in roles if name not in ("chat-0", "chat-1")]

    async def one(name: str) -> None:
        async with open_store(address) as store:
            await flip_instance(store, "chat", name, Role.PREFILL, namespace=namespace, reason="at once")

    await asyncio.gather(*(one(name) for name in names))
    spec = chat.assignment()["spec"]
    assert {name: entry["role"] for name, entry in spec["roles"].items()} == {
        name: "Decode" if name == "chat-1" else "Prefill" for name in roles
    }
    assert spec["flips"] == len(names)


# drain


def test_drain_wait_returns_when_drained_and_undo_lifts_it(fulcrum: CommandLine, chat: Service) -> None:
    process = fulcrum.start("drain", "chat-2", "--wait")
    try:
        wait_for(lambda: chat.entry("chat-2")["cordoned"], "the cordon", timeout_s=20)
        chat.set_instance_status("chat-2", role="Decode", phase="Draining", reason="Drained")
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert "undo with `fulcrum drain chat-2 --undo`; drained, no request is left on it (" in out
    entry = chat.entry("chat-2")
    assert (entry["cordonedBy"], entry["cordonReason"], entry["by"]) == (
        "Person",
        "drained by command",
        "Operator",
    )
    assert stdout_of(fulcrum("drain", "chat-2", "--undo")).startswith("chat-2: gets new requests again (")
    assert chat.entry("chat-2")["cordoned"] is False


def test_a_person_cannot_lift_the_operators_cordon(fulcrum: CommandLine, chat: Service) -> None:
    chat.patch_entry(
        "chat-2", cordoned=True, cordonedBy="Operator", cordonReason="more instances than desired"
    )
    assert refusal_of(fulcrum("drain", "chat-2", "--undo")) == (
        "instance (chat-2) was cordoned by the operator to remove it: more instances than desired"
    )


# explain


@contextmanager
def autoscaler(cluster: Cluster, namespace: str, response: Any) -> Iterator[list[str]]:
    """Serve `response` as an autoscaler behind the API server; yield the requested paths."""
    paths: list[str] = []

    class DecisionsHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            body = json.dumps(response).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: the test reads the paths."""

    with cluster.hub.enter_network():
        server = http.server.ThreadingHTTPServer(("10.88.0.1", 0), DecisionsHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    labels = {"app.kubernetes.io/part-of": "fulcrum", "app.kubernetes.io/component": "autoscaler"}
    port = {"name": "http", "port": server.server_address[1]}
    pod = {"kind": "Pod", "name": "fulcrum-autoscaler-0", "namespace": namespace}
    containers = [{"name": "autoscaler", "image": "localhost/fulcrum:1"}]
    address = {"ip": "10.88.0.1", "targetRef": pod}
    create_objects(cluster, namespace, [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod["name"]},
         "spec": {"containers": containers}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "fulcrum-autoscaler", "labels": labels},
         "spec": {"ports": [port]}},
        {"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "fulcrum-autoscaler"},
         "subsets": [{"addresses": [address], "ports": [port]}]},
    ])  # fmt: skip
    status = {"status": {"podIP": "10.88.0.1", "podIPs": [{"ip": "10.88.0.1"}]}}
    where = ("-n", namespace, "patch", "pod", pod["name"], "--subresource=status", "--type=merge", "-p")
    cluster.kubectl(*where, json.dumps(status))  # the API server proxies to addresses of pods only
    health_path = f"/api/v1/namespaces/{namespace}/services/fulcrum-autoscaler:http/proxy/"
    try:
        wait_for(
            lambda: cluster.get(health_path)[0] == 200, "the autoscaler through the API server", timeout_s=20
        )
        paths.clear()
        yield paths
    finally:
        cluster.kubectl("-n", namespace, "delete", "service", "fulcrum-autoscaler")
        server.shutdown()
        thread.join()
        server.server_close()


DECISION = {
    "at_s": 1_700_000_000.25, "action": "flip", "trigger": "tick", "reason": "decode load 1.04",
    "instance": "chat-1", "to": "Prefill", "loads": None, "consecutive_ticks": 2, "split": "1:2",
    "generation": 7,
    "rejected": [],
}  # fmt: skip


def test_explain_asks_the_autoscaler_through_the_api_server(
    control_plane: Cluster, fulcrum: CommandLine, chat: Service
) -> None:
    assert chat
    with autoscaler(control_plane, fulcrum.namespace, [DECISION]) as paths:
        stdout = stdout_of(fulcrum("explain"))
    assert "flip    chat-1 → Prefill: decode load 1.04  [P:D 1:2, 2 ticks in a row, tick]" in stdout
    assert "no flip is refused now" in stdout
    assert paths == [f"/decisions?namespace={fulcrum.namespace}&service=chat&limit=600"]


def test_explain_without_an_autoscaler_prints_the_rest(fulcrum: CommandLine, chat: Service) -> None:
    refusal = {"role": "Prefill", "reason": "below the floor", "until": "2999-01-01T00:00:00Z"}
    chat.patch_entry("chat-1", refused=refusal)
    stdout = stdout_of(fulcrum("explain", "chat"))
    assert stdout.startswith("cannot read the autoscaler's decisions: ")
    assert "refused chat-1 → Prefill: below the floor, for " in stdout


# connection


def broken(
    change: Callable[[dict[str, Any], dict[str, Any]], object],
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(document: dict[str, Any]) -> dict[str, Any]:
        change(document["clusters"][0]["cluster"], document["users"][0])
        return document

    return changed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            broken(lambda cluster, _: cluster.update(server="https://127.0.0.1:1")),
            "error: context test (https://127.0.0.1:1) does not respond: ",
            id="no server on the port",
        ),
        pytest.param(
            broken(lambda cluster, _: cluster.pop("certificate-authority-data")),
            "certificate verify failed", id="a server that is not trusted",
        ),
        pytest.param(
            broken(lambda _, user: user.update(user={"token": "x"})),
            "does not accept these credentials", id="a token that is not valid",
        ),
        pytest.param(
            broken(lambda _, user: user.update(user={})),
            "system:anonymous cannot list pdservices.fulcrum.dev in namespace",
            id="a user without permissions",
        ),
    ],
)  # fmt: skip
def test_an_unreachable_cluster_is_reported_in_one_line(
    control_plane: Cluster, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], expected: str
) -> None:
    file = tmp_path / "config"
    file.write_text(json.dumps(change(json.loads(Path(control_plane.kubeconfig).read_text()))))
    done = CommandLine(file, tmp_path, "default")("status")
    assert expected in done.stderr
    refusal_of(done)


def test_an_unknown_context_is_refused_with_the_known_names(fulcrum: CommandLine) -> None:
    message = refusal_of(fulcrum("status", "--context", "prod"))
    assert message == f"--context (prod) is not a context of {fulcrum.kubeconfig}; it has test"


def test_a_silent_api_server_times_out_after_five_seconds(control_plane: Cluster, tmp_path: Path) -> None:
    """The server accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"https://127.0.0.1:{silent.getsockname()[1]}"
        file = tmp_path / "config"
        change = broken(lambda cluster, _: cluster.update(server=server))
        file.write_text(json.dumps(change(json.loads(Path(control_plane.kubeconfig).read_text()))))
        message = refusal_of(CommandLine(file, tmp_path, "default")("status"))
    assert message == f"context test ({server}) does not respond: no response within 5 s"


# kubectl plugin


def test_kubectl_finds_the_plugin_which_calls_itself_kubectl_fulcrum(
    fulcrum: CommandLine, chat: Service
) -> None:
    assert chat
    installed = Path(sys.executable).parent
    environment = {**fulcrum.environment, "PATH": f"{installed}:{fulcrum.environment['PATH']}"}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [str(ensure_program()), "kubectl", "fulcrum", *arguments, "-n", fulcrum.namespace]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=30, check=False
        )

    assert "chat-0     Serving   Prefill" in stdout_of(run("status", "chat"))
    assert "Usage: kubectl fulcrum status" in stdout_of(run("status", "--help"))
    message = refusal_of(run("flip", "chat-0", "--to", "decode"))
    assert message.endswith("leaving: chat-0; flip another instance to Prefill first")
