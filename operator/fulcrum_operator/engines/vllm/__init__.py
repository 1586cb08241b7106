"""The adapter of vLLM: command line, environment and volumes of one instance, or why not. Pure."""

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
