"""Manifests of the Kubernetes objects that the operator creates, as dictionaries. Pure.

`controller/` applies them. Which instances there should be is decided in `plan/`.
"""
