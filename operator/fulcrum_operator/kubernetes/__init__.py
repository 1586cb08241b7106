"""The operator in a cluster: kopf feeds a cache, pods are the engines, one of several processes leads."""
