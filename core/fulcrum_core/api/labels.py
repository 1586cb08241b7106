"""Labels by which operator, router and CLI find each other's objects and those of the chart.

The operator and the chart set them. Only constants; labels that nobody selects by are in
`fulcrum_operator.manifests`.
"""

SERVICE_LABEL = "fulcrum.dev/service"
"""Label with the name of the service: on pools, instances, engine pods and model reader pods."""
POOL_LABEL = "fulcrum.dev/pool"
INSTANCE_LABEL = "fulcrum.dev/instance"
REVISION_LABEL = "fulcrum.dev/revision"
ROLE_LABEL = "fulcrum.dev/role"
"""The effective role; patched on a flip, and in no selector: a flip must never take a pod out of anything."""
ROUTER_LABEL = "fulcrum.dev/router"
"""Label of router pods with the name of the service; they have no `SERVICE_LABEL`."""
WATCHED_NAMESPACE_LABEL = "fulcrum.dev/watched-namespace"
"""Label of the chart's Deployments of operator and autoscaler with the one namespace that they watch."""
