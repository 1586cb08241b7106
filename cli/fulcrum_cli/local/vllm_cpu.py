"""What `fulcrum up --local --engine` puts in the place of a manifest's engines."""

from enum import StrEnum

from fulcrum_core.api import PDService, parse_object
from fulcrum_core.api.meta import Resource

TINY_MODEL = "tiny-model"
"""The model that `make engine` makes beside the engines; a local run finds it by this name."""

_ENGINE_SPECIFIC_FIELDS = ("hardware", "parallelism", "quantization", "settings", "template")


class LocalEngine(StrEnum):
    """Which engine, on this machine."""

    VLLM_CPU = "vllm-cpu"


def replace_engine_with_vllm_cpu(obj: Resource) -> Resource:
    """A service on vLLM for CPUs with the tiny model, without what was said of another engine."""
    if not isinstance(obj, PDService):
        return obj
    document = obj.dump()
    spec = document["spec"]
    for part in (spec, *spec.get("pools", ())):
        for name in _ENGINE_SPECIFIC_FIELDS:
            part.pop(name, None)
    spec.pop("modelSource", None)
    spec |= {"engine": {"type": "vLLM"}, "model": TINY_MODEL}
    return parse_object(document)
