"""The operator's control loop: `reconcile`, its work queue, and their connection to a Kubernetes cluster.

A local run uses `reconcile` and `work_queue` only; `leader` wires the rest together for a cluster. What to
change is decided in `plan/`, what objects look like in `manifests/`.
"""
