"""Adapters that all shells share: stores, Kubernetes objects, leader election, the router client.

`MemoryStore` is in the same process; `open_store(ADDRESS)` connects to a local run's socket or a Kubernetes
cluster; `open_cluster(ADDRESS).objects` accesses other Kubernetes objects; `Informer` follows our kinds.
"""
