"""Manifests of the Kubernetes objects that the operator creates, as dictionaries. Pure."""
