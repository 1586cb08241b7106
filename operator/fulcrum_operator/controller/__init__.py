"""The control loop: queue, reconcile, and its shell on Kubernetes (cache, leader election, kopf, Events)."""
