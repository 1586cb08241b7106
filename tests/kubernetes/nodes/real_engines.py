"""Manifest and volume claims for vLLM in pods: an image without weights, and claims for all large files.

The engine environment and its interpreter are mounted from claims, too, at the same paths as on this machine,
because a virtual environment cannot be moved.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.engines.services import MODEL
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.images import find_interpreter

IMAGE = "localhost/vllm:1"
ENGINES = 2
WEIGHTS_CLAIM = "weights"


def copy_model_for_all_users(environment: Path, folder: Path) -> Path:
    """Copy the model so that any user may read it: pods do not run as root."""
    model = folder / MODEL
    shutil.copytree(environment / MODEL, model)
    for path in (folder, model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return model


class VolumeClaims:
    """Folders of the nodes as volumes, with claims in one namespace."""

    def __init__(
        self, cluster: Cluster, namespace: str, folders: dict[str, Path], *, access: str = "ReadOnlyMany"
    ) -> None:
        self._cluster, self._namespace, self._folders = cluster, namespace, folders
        self._access = {"accessModes": [access], "storageClassName": ""}

    def create(self) -> None:
        """Create volumes and claims, bound to each other by name."""
        items = [body for name in self._folders for body in (self._volume(name), self._claim(name))]
        self._cluster.kubectl("apply", "-f", "-", stdin=json.dumps(_build_list(items)))

    def delete(self) -> None:
        """Delete the volumes; the claims are deleted with the namespace."""
        self._cluster.kubectl(
            "delete", "persistentvolume", "--wait=false", *map(self._volume_name, self._folders)
        )

    def _volume_name(self, name: str) -> str:
        return f"{self._namespace}-{name}"

    def _volume(self, name: str) -> dict[str, Any]:
        spec = {
            **self._access,
            "capacity": _CAPACITY,
            "hostPath": {"path": str(self._folders[name]), "type": "Directory"},
            "claimRef": {"namespace": self._namespace, "name": name},
        }
        metadata = {"name": self._volume_name(name)}
        return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec}

    def _claim(self, name: str) -> dict[str, Any]:
        spec = {
            **self._access,
            "resources": {"requests": _CAPACITY},
            "volumeName": self._volume_name(name),
        }
        metadata = {"name": name, "namespace": self._namespace}
        return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


_CAPACITY = {"storage": "8Gi"}


def _build_list(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": items}


def list_claim_folders(environment: Path, model: Path) -> dict[str, Path]:
    """Return the folder behind each claim."""
    return {"environment": environment, "interpreter": find_interpreter(environment), WEIGHTS_CLAIM: model}


def build_manifest(environment: Path) -> dict[str, Any]:
    """Return a PDService with two engines on two nodes and without an autoscaler's flips."""
    spec = {
        "model": MODEL,
        "modelSource": {"pvc": WEIGHTS_CLAIM},
        "engine": {"type": "vLLM", "image": IMAGE},
        "pools": [
            {
                "name": "flex",
                "instances": {"min": ENGINES},
                "hardware": {"resource": "cpu"},
                "template": {"spec": _build_pod_overlay(environment)},
            }
        ],
        "autoscaling": {"mode": "Off"},
        "drain": {"timeout": "5s"},  # at its end vLLM waits this long for canaries that nobody fetched
    }
    head = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDService", "metadata": {"name": "chat"}}
    return {**head, "spec": spec}


def _build_pod_overlay(environment: Path) -> dict[str, Any]:
    """Return the pod template: mounts the environment at its path and puts each engine on another node."""
    mounted = {"environment": environment, "interpreter": find_interpreter(environment)}
    mounts = [{"name": name, "mountPath": str(path), "readOnly": True} for name, path in mounted.items()]
    volumes = [
        {"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}} for name in mounted
    ]
    spread = {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    return {
        "containers": [{"name": "engine", "volumeMounts": mounts}],
        "volumes": volumes,
        "topologySpreadConstraints": [spread],
    }
