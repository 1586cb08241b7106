"""`fulcrum up --local --engine vllm-cpu`: run a manifest for GPUs on vLLM for CPUs with a tiny model."""

from enum import StrEnum

from fulcrum_core.api import PDService, parse_object
from fulcrum_core.api.meta import Resource

TINY_MODEL = "tiny-model"
"""Name of the model that `make engine` creates in the engine environment."""

_ENGINE_SPECIFIC_FIELDS = ("hardware", "parallelism", "quantization", "settings", "template")


class LocalEngine(StrEnum):
    """Values of `--engine`."""

    VLLM_CPU = "vllm-cpu"


def replace_engine_with_vllm_cpu(obj: Resource) -> Resource:
    """Return a PDService on vLLM for CPUs with the tiny model, without the fields of its own engine.

    Other objects are returned unchanged.
    """
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
