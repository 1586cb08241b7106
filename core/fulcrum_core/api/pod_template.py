"""Patches of pods, and what of them that has no effect, or can be read by many users although it is a secret.

A template is a patch of a pod, of which the API server checks nothing before a pod is created. New manifests
are refused by our own programs; a stored template is used as it is, and the condition Degraded names these.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from fulcrum_core.api.env import find_token_argument, looks_like_token

PodTemplatePatch = Annotated[
    dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
]
"""A strategic merge patch of a pod, as `metadata` and `spec`."""

IPC_LOCK_RULE = (
    "capability IPC_LOCK has no effect: Linux gives capabilities only to root; set runAsUser: 0 and "
    "runAsNonRoot: false in the container's securityContext, or raise the memlock limit of the nodes' "
    "container runtime instead"
)


def find_template_problems(template: Mapping[str, Any]) -> tuple[str, ...]:
    """The problems of a template, without the values of secrets."""
    spec = _as_map(template.get("spec"))
    pod_context = _as_map(spec.get("securityContext"))
    containers = [*_as_maps(spec.get("initContainers")), *_as_maps(spec.get("containers"))]
    return tuple(
        f"container {container.get('name', '')}: {problem}"
        for container in containers
        for problem in _find_container_problems(container, pod_context)
    )


def _find_container_problems(container: Mapping[str, Any], pod_context: Mapping[str, Any]) -> Iterator[str]:
    for variable in _as_maps(container.get("env")):
        name, value = str(variable.get("name", "")), variable.get("value")
        if isinstance(value, str) and looks_like_token(name, value):
            yield (
                f"the literal of {name} looks like a token: keep it in a Secret and write "
                "valueFrom: {secretKeyRef: {name: SECRET, key: KEY}} instead of value"
            )
    arguments = [str(each) for field in ("command", "args") for each in _as_list(container.get(field))]
    if find_token_argument(arguments):
        yield "an argument contains a token: keep it in a Secret and write $(VARIABLE) in the argument"
    context = _as_map(container.get("securityContext"))
    added = _as_list(_as_map(context.get("capabilities")).get("add"))
    user = context.get("runAsUser", pod_context.get("runAsUser", "ours"))
    if "IPC_LOCK" in added and user not in (0, None):
        yield IPC_LOCK_RULE


def _as_map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_maps(value: object) -> list[Mapping[str, Any]]:
    return [each for each in _as_list(value) if isinstance(each, Mapping)]
