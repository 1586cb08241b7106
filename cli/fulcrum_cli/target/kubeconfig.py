"""Reads context, server and namespace from kubeconfig files; `fulcrum_cluster` connects with them.

Several files in KUBECONFIG are merged as kubectl does: the first entry of each name counts. `selection` uses
it to choose and print the target.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fulcrum_core.errors import InvalidInput

DEFAULT_KUBECONFIG = Path("~/.kube/config")


@dataclass(frozen=True, slots=True)
class KubeContext:
    """A context: its name, the address of its API server and its default namespace."""

    name: str
    server: str
    namespace: str


def kubeconfig_files(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the existing files of KUBECONFIG; without that variable, `~/.kube/config` if it exists."""
    paths = [Path(part) for part in environment.get("KUBECONFIG", "").split(os.pathsep) if part]
    return tuple(path for path in paths or [DEFAULT_KUBECONFIG.expanduser()] if path.is_file())


def read_context(files: Sequence[Path], name: str | None) -> KubeContext:
    """Return the named context; without a name the current context.

    Raises:
        InvalidInput: if a file cannot be read, or the context or its cluster does not exist.
    """
    documents = [_read(path) for path in files]
    source = os.pathsep.join(map(str, files))
    contexts, clusters = (
        _index_by_name(documents, "contexts", "context"),
        _index_by_name(documents, "clusters", "cluster"),
    )
    current = next((str(found) for doc in documents if (found := doc.get("current-context"))), None)
    chosen = name or current
    if chosen is None:
        raise InvalidInput("kubeconfig", source, "has no current context: select one with --context")
    if chosen not in contexts:
        path = "--context" if name else f"{source}: current-context"
        known = ", ".join(sorted(contexts)) or "none"
        raise InvalidInput(path, chosen, f"is not a context of {source}; it has {known}")
    context = contexts[chosen]
    cluster = clusters.get(str(context.get("cluster")))
    if cluster is None or not cluster.get("server"):
        raise InvalidInput(
            f"{source}: cluster of context {chosen}", context.get("cluster"), "is not a cluster of this file"
        )
    return KubeContext(chosen, str(cluster["server"]), str(context.get("namespace") or "default"))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput("--kubeconfig", path, "must be a file that exists") from None
    except OSError as error:
        raise InvalidInput("kubeconfig", path, f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError):
        raise InvalidInput("kubeconfig", path, "is not YAML") from None
    if not isinstance(document, dict):
        raise InvalidInput("kubeconfig", path, "is not a kubeconfig")
    return document


def _index_by_name(
    documents: Sequence[Mapping[str, Any]], group: str, item: str
) -> dict[str, Mapping[str, Any]]:
    """Return the entries of one list of all files by name; the first entry of a name counts."""
    found: dict[str, Mapping[str, Any]] = {}
    for document in documents:
        for entry in document.get(group) or ():
            if isinstance(entry, dict) and isinstance(entry.get(item), dict):
                found.setdefault(str(entry.get("name")), entry[item])
    return found
