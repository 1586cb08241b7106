"""The adapter of vLLM: the launch of one instance, or what is unsupported. Pure."""

from fulcrum_operator.engines.vllm.launch import (
    IMAGE,
    POD_PLACEMENT,
    VERSION,
    build_launch,
    expected_identity_and_startup_s,
    model_folder,
    model_volume,
    plan_engine,
)

__all__ = [
    "IMAGE",
    "POD_PLACEMENT",
    "VERSION",
    "build_launch",
    "expected_identity_and_startup_s",
    "model_folder",
    "model_volume",
    "plan_engine",
]
