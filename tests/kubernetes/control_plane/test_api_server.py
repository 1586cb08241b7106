"""What only a real API server shows of the store adapter: permissions, history, many objects, our rules."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fulcrum_cluster.client import ClusterClient, open_cluster, resolve_client_config
from fulcrum_cluster.client_config import in_cluster_config
from fulcrum_cluster.informer import Informer
from fulcrum_cluster.objects import CONFIG_MAP, CRD, SERVICE_ACCOUNT, kind_of_resource
from fulcrum_core.api import KINDS, ObjectMeta, PDInstance, PDPool, QoSTier, QoSTierSpec, Resource
from fulcrum_core.errors import AlreadyExists, Conflict, Forbidden, InvalidInput, NotFound
from tests.waiting import wait_until
from tools.kubernetes.cluster import Cluster as RealCluster

DEADLINE_S = 30.0
START = {"model": "m", "engine": {"type": "Simulated"}}
POOL = {**START, "service": "chat", "role": "Flexible", "replicas": 2, "instances": {"min": 1, "max": 4}}


@pytest.fixture
async def cluster(control_plane: RealCluster) -> AsyncIterator[ClusterClient]:
    async with open_cluster(f"kubeconfig:{control_plane.kubeconfig}", program="tests") as found:
        yield found


def made(kind: type[Resource], name: str, spec: dict[str, Any]) -> dict[str, Any]:
    where = kind_of_resource(kind)
    return {"apiVersion": where.api_version, "kind": where.kind, "metadata": {"name": name}, "spec": spec}


def config_map(namespace: str, name: str, value: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": value}}


@contextlib.asynccontextmanager
async def following(informer: Informer[QoSTier]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(informer.run())
    try:
        await wait_until(informer.synced.is_set, timeout_s=DEADLINE_S)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class TestOurKinds:
    async def test_each_kind_is_established_with_a_structural_schema(self, cluster: ClusterClient) -> None:
        for kind in KINDS:
            crd = await cluster.objects.get(CRD, f"{kind.plural}.fulcrum.dev", namespace="")
            states = {state["type"]: state["status"] for state in crd["status"]["conditions"]}
            assert (states["Established"], states["NamesAccepted"], states.get("NonStructuralSchema")) == (
                "True",
                "True",
                None,
            )

    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
    def test_kubectl_explains_every_field(self, control_plane: RealCluster, kind: type[Resource]) -> None:
        schema = json.loads(control_plane.kubectl("get", "--raw", "/openapi/v3/apis/fulcrum.dev/v1alpha1"))
        (root,) = (
            node
            for name, node in schema["components"]["schemas"].items()
            if name.endswith(f".{kind.kind_name()}")
        )
        fields = {name: root["properties"][name] for name in ("spec", "status") if name in root["properties"]}
        assert [path for path in _undescribed(fields, ()) if path] == []
        assert "DESCRIPTION:" in control_plane.kubectl("explain", f"{kind.plural}.spec", "--recursive")

    @pytest.mark.parametrize(
        ("kind", "spec", "patch", "path"),
        [
            pytest.param(PDPool, POOL, {"service": "other"}, "spec.service", id="the service of a pool"),
            pytest.param(
                PDInstance,
                {**START, "service": "chat", "pool": "flex"},
                {"pool": "other"},
                "spec.pool",
                id="the pool of an instance",
            ),
        ],
    )
    async def test_immutable_field_cannot_be_changed(
        self,
        cluster: ClusterClient,
        namespace: str,
        kind: type[Resource],
        spec: dict[str, Any],
        patch: dict[str, Any],
        path: str,
    ) -> None:
        where = kind_of_resource(kind)
        await cluster.objects.create(where, made(kind, "x", spec), namespace=namespace)
        with pytest.raises(InvalidInput, match="cannot be changed") as refused:
            await cluster.objects.patch(where, "x", {"spec": patch}, namespace=namespace)
        assert refused.value.path == path

    async def test_a_pool_is_scaled_by_its_subresource(self, cluster: ClusterClient, namespace: str) -> None:
        where = kind_of_resource(PDPool)
        await cluster.objects.create(where, made(PDPool, "x", POOL), namespace=namespace)
        scaled = await cluster.objects.patch(
            where, "x", {"spec": {"replicas": 4}}, namespace=namespace, subresource="scale"
        )
        stored = await cluster.store.get(PDPool, "x", namespace=namespace)
        assert (scaled["kind"], stored.spec.replicas, stored.metadata.generation) == ("Scale", 4, 2)

    async def test_applying_a_pool_without_replicas_keeps_its_replicas(
        self, cluster: ClusterClient, namespace: str
    ) -> None:
        where = kind_of_resource(PDPool)
        await cluster.objects.create(where, made(PDPool, "x", POOL), namespace=namespace)
        rest = {key: value for key, value in POOL.items() if key != "replicas"}
        body = made(PDPool, "x", {**rest, "instances": {"min": 2, "max": 4}})
        body["metadata"]["namespace"] = namespace
        after = await cluster.objects.apply(body, manager="operator", force=True)
        assert (after["spec"]["replicas"], after["spec"]["instances"]) == (2, {"min": 2, "max": 4})


class TestAnyObject:
    async def test_applying_another_managers_field_conflicts_unless_forced(
        self, cluster: ClusterClient, namespace: str
    ) -> None:
        await cluster.objects.apply(config_map(namespace, "x", "1"), manager="you")
        with pytest.raises(Conflict, match=r'data\.a .*"you"'):
            await cluster.objects.apply(config_map(namespace, "x", "2"), manager="me")
        forced = await cluster.objects.apply(config_map(namespace, "x", "2"), manager="me", force=True)
        assert forced["data"] == {"a": "2"}

    async def test_a_dry_run_stores_nothing(self, cluster: ClusterClient, namespace: str) -> None:
        body = config_map(namespace, "x", "1")
        await cluster.objects.create(CONFIG_MAP, body, namespace=namespace, dry_run=True)
        await cluster.objects.apply(body, manager="me", dry_run=True)
        with pytest.raises(NotFound):
            await cluster.objects.get(CONFIG_MAP, "x", namespace=namespace)

    async def test_creating_a_second_object_of_one_name_is_already_exists(
        self, cluster: ClusterClient, namespace: str
    ) -> None:
        body = config_map(namespace, "x", "1")
        await cluster.objects.create(CONFIG_MAP, body, namespace=namespace)
        with pytest.raises(AlreadyExists):
            await cluster.objects.create(CONFIG_MAP, body, namespace=namespace)

    async def test_replacing_an_old_version_conflicts(self, cluster: ClusterClient, namespace: str) -> None:
        old = await cluster.objects.create(CONFIG_MAP, config_map(namespace, "x", "1"), namespace=namespace)
        await cluster.objects.replace({**old, "data": {"a": "2"}})
        with pytest.raises(Conflict):
            await cluster.objects.replace({**old, "data": {"a": "3"}})

    async def test_a_delete_with_another_uid_conflicts(self, cluster: ClusterClient, namespace: str) -> None:
        body = config_map(namespace, "x", "1")
        uid = (await cluster.objects.create(CONFIG_MAP, body, namespace=namespace))["metadata"]["uid"]
        with pytest.raises(Conflict):
            await cluster.objects.delete(CONFIG_MAP, "x", namespace=namespace, uid="another")
        await cluster.objects.delete(CONFIG_MAP, "x", namespace=namespace, uid=uid)
        with pytest.raises(NotFound):
            await cluster.objects.delete(CONFIG_MAP, "x", namespace=namespace)

    async def test_a_label_selector_limits_list_and_watch(
        self, cluster: ClusterClient, namespace: str
    ) -> None:
        _, since = await cluster.objects.list(CONFIG_MAP, namespace=namespace, labels="a=b")
        for name, labels in (("other", {}), ("mine", {"a": "b"})):
            body = config_map(namespace, name, "1")
            body["metadata"]["labels"] = labels
            await cluster.objects.create(CONFIG_MAP, body, namespace=namespace)
        listed, _ = await cluster.objects.list(CONFIG_MAP, namespace=namespace, labels="a=b")
        watch = cluster.objects.watch(CONFIG_MAP, namespace=namespace, since=since, labels="a=b")
        async with contextlib.aclosing(watch), asyncio.timeout(DEADLINE_S):
            _, first = await anext(watch)
        assert [item["metadata"]["name"] for item in (*listed, first)] == ["mine", "mine"]

    async def test_a_path_is_read_as_json_or_text(self, cluster: ClusterClient) -> None:
        assert (await cluster.objects.get_raw("/version"))["major"] == "1"
        assert await cluster.objects.get_raw("/readyz") == "ok"


class TestMirror:
    async def test_a_mirror_of_all_namespaces_keeps_objects_of_one_name_apart(
        self, cluster: ClusterClient, namespace: str
    ) -> None:
        name = f"gold-{secrets.token_hex(4)}"
        informer = Informer(cluster.store, QoSTier, namespace="")
        async with following(informer):
            for where, priority in ((namespace, 1), ("default", 2)):
                metadata = ObjectMeta(name=name, namespace=where)
                await cluster.store.create(QoSTier(metadata=metadata, spec=QoSTierSpec(priority=priority)))
            await wait_until(
                lambda: {f"{namespace}/{name}", f"default/{name}"} <= informer.objects.keys(),
                timeout_s=DEADLINE_S,
            )
            await cluster.store.delete(QoSTier, name, namespace="default")
            await wait_until(lambda: f"default/{name}" not in informer.objects, timeout_s=DEADLINE_S)
            kept = informer.find(namespace, name)
        assert kept is not None
        assert kept.spec.priority == 1

    async def test_a_mirror_is_complete_again_after_the_watch_history_is_lost(
        self, cluster: ClusterClient, namespace: str
    ) -> None:
        informer = Informer(cluster.store, QoSTier, namespace=namespace)
        async with following(informer):
            await cluster.store.create(QoSTier(metadata=ObjectMeta(name="before", namespace=namespace)))
            await wait_until(lambda: "before" in informer.objects, timeout_s=DEADLINE_S)
            # A change of the CRD ends its watches, and makes the server forget what was before it.
            names = {"spec": {"names": {"categories": ["fulcrum", f"c-{secrets.token_hex(4)}"]}}}
            await cluster.objects.patch(CRD, "qostiers.fulcrum.dev", names, namespace="")
            await cluster.store.create(QoSTier(metadata=ObjectMeta(name="after", namespace=namespace)))
            await cluster.store.delete(QoSTier, "before", namespace=namespace)
            await wait_until(lambda: informer.objects.keys() == {"after"}, timeout_s=DEADLINE_S)


class TestAccount:
    async def test_a_pod_uses_its_service_account_and_an_error_names_the_missing_right(
        self, control_plane: RealCluster, namespace: str, tmp_path: Path
    ) -> None:
        _mount_account(control_plane, namespace, tmp_path)
        url = resolve_client_config(f"kubeconfig:{control_plane.kubeconfig}").url
        host, port = url.removeprefix("https://").split(":")
        environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        access = in_cluster_config(folder=tmp_path, environment=environment)
        assert access.namespace == namespace
        async with ClusterClient(access) as pod:
            assert await pod.objects.get_raw("/readyz") == "ok"
            with pytest.raises(Forbidden) as refused:
                await pod.store.list(QoSTier, namespace=namespace)
            who = f"system:serviceaccount:{namespace}:default"
            assert str(refused.value) == f"{who} cannot list qostiers.fulcrum.dev in namespace {namespace}"
            (tmp_path / "token").write_text("no token", encoding="utf-8")
            assert access.token is not None
            access.token.invalidate()
            with pytest.raises(Forbidden, match="does not accept these credentials"):
                await pod.objects.get(SERVICE_ACCOUNT, "default", namespace=namespace)


def _mount_account(control_plane: RealCluster, namespace: str, folder: Path) -> None:
    """What a kubelet would mount into a pod of the namespace's default account."""
    (folder / "token").write_text(control_plane.kubectl("create", "token", "default", "-n", namespace))
    (folder / "namespace").write_text(namespace)
    (folder / "ca.crt").write_bytes((control_plane.folder / "pki/ca.crt").read_bytes())


def _undescribed(fields: dict[str, Any], at: tuple[str, ...]) -> list[str]:
    """The paths of fields without a description."""
    undescribed: list[str] = []
    for name, node in fields.items():
        path = (*at, name)
        if not node.get("description"):
            undescribed.append(".".join(path))
        for inner in (node, node.get("items", {}), node.get("additionalProperties", {})):
            if isinstance(inner, dict):
                undescribed += _undescribed(inner.get("properties", {}), path)
    return undescribed
