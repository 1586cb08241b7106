"""Installs Fulcrum as a user does, with Helm; each action of `helm` is a program of its own.

The scenarios install, upgrade and uninstall releases with it. It waits for objects, not for services.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tools.kubernetes.cluster import Cluster

CHART = ROOT / "helm" / "fulcrum"
RELEASE, NAMESPACE = "fulcrum", "fulcrum-system"
HELM_PROGRAM = "tests.kubernetes.nodes.helm_program"
IMAGE, NEXT_IMAGE = "localhost/fulcrum:1", "localhost/fulcrum:2"


def build_values(image: str = IMAGE, **more: Any) -> dict[str, Any]:
    """Return chart values with this image."""
    repository, _, tag = image.rpartition(":")
    return {"image": {"repository": repository, "tag": tag}, **more}


class Helm:
    """Helm commands for the release in one namespace of a cluster."""

    def __init__(self, cluster: Cluster, namespace: str = NAMESPACE) -> None:
        self._cluster, self._namespace = cluster, namespace

    def install(
        self, settings: Mapping[str, Any], *, wait: bool = True, chart: Path = CHART
    ) -> dict[str, Any]:
        """Run `helm install`; with `wait`, wait until all objects are ready."""
        options = {"create_namespace": True, "timeout": 60} | ({"wait": "watcher"} if wait else {})
        return self._run("install", str(chart), RELEASE, settings, **options)

    def upgrade(self, settings: Mapping[str, Any], *, wait: bool = True) -> dict[str, Any]:
        """Run `helm upgrade`; with `wait`, wait until all objects are ready."""
        options = {"timeout": 120} | ({"wait": "watcher"} if wait else {})
        return self._run("upgrade", str(CHART), RELEASE, settings, **options)

    def uninstall(self) -> dict[str, Any]:
        """Run `helm uninstall` and wait until all objects are deleted; succeeds if nothing is installed."""
        return self._run("uninstall", RELEASE, timeout=60, wait="watcher", ignore_not_found=True)

    def test(self) -> dict[str, Any]:
        """Run `helm test`; RuntimeError if the release fails it."""
        return self._run("test", RELEASE, timeout=60)

    def _run(self, action: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        request = {
            "kubeconfig": str(self._cluster.kubeconfig),
            "namespace": self._namespace,
            "action": action,
            "arguments": arguments,
            "options": options,
        }
        done = subprocess.run(
            [sys.executable, "-m", HELM_PROGRAM],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        release: dict[str, Any] = json.loads(done.stdout)
        return release
