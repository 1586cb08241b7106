"""Real engines in pods, as their user has them: an image without weights, and claims for all that is large.

The engine environment and its interpreter are claims, too. They are mounted where they lie on this machine,
as a virtual environment cannot be moved.
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
    """A copy of the model that any user may read: a pod is not this machine's root."""
    model = folder / MODEL
    shutil.copytree(environment / MODEL, model)
    for path in (folder, model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return model


class VolumeClaims:
    """Folders of the nodes as claims of one namespace, for reading by many; volumes are the cluster's."""

    def __init__(self, cluster: Cluster, namespace: str, folders: dict[str, Path]) -> None:
        self._cluster, self._namespace, self._folders = cluster, namespace, folders

    def create(self) -> None:
        """Makes volumes and claims, bound to each other by name."""
        items = [body for name in self._folders for body in (self._volume(name), self._claim(name))]
        self._cluster.kubectl("apply", "-f", "-", stdin=json.dumps(_build_list(items)))

    def delete(self) -> None:
        """Removes the volumes; the claims go with the namespace."""
        self._cluster.kubectl(
            "delete", "persistentvolume", "--wait=false", *map(self._volume_name, self._folders)
        )

    def _volume_name(self, name: str) -> str:
        return f"{self._namespace}-{name}"

    def _volume(self, name: str) -> dict[str, Any]:
        spec = {
            **_READ_ONLY_MANY,
            "capacity": _CAPACITY,
            "hostPath": {"path": str(self._folders[name]), "type": "Directory"},
            "claimRef": {"namespace": self._namespace, "name": name},
        }
        metadata = {"name": self._volume_name(name)}
        return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec}

    def _claim(self, name: str) -> dict[str, Any]:
        spec = {
            **_READ_ONLY_MANY,
            "resources": {"requests": _CAPACITY},
            "volumeName": self._volume_name(name),
        }
        metadata = {"name": name, "namespace": self._namespace}
        return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


_READ_ONLY_MANY = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
_CAPACITY = {"storage": "8Gi"}


def _build_list(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": items}


def list_claim_folders(environment: Path, model: Path) -> dict[str, Path]:
    """What the claims hold, by their names."""
    return {"environment": environment, "interpreter": find_interpreter(environment), WEIGHTS_CLAIM: model}


def build_manifest(environment: Path) -> dict[str, Any]:
    """Two engines, each on a node of its own, that flip when a person says so."""
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
        "drain": {"timeout": "5s"},  # at the end vLLM waits as long for canaries that nobody fetches
    }
    head = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDService", "metadata": {"name": "chat"}}
    return {**head, "spec": spec}


def _build_pod_overlay(environment: Path) -> dict[str, Any]:
    """What is laid over the operator's pod: the environment where it was made, and one engine to a node."""
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
