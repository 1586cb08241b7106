"""Where desired state lives: one store behind core's port, in memory, on a unix socket, on an API server.

Shells reach a store through `MemoryStore` (same process) or `open_store(ADDRESS)` (a local run's socket or a
Kubernetes cluster), reach any other Kubernetes object through `open_cluster(ADDRESS).objects`, follow our
kinds with `Informer`, and share here what every process does at its start and end.
"""
