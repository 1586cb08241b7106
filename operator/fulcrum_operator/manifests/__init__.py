"""The Kubernetes objects that the operator creates, as dictionaries. Pure."""
