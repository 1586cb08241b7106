{{/*
Permissions of the components. A test compares each rule with the API server's audit log.

The operator creates a Role for each service's router, and the API server lets it grant only what it may do itself.
The alternative, one ClusterRole for all routers and the permission to bind it, grants the operator less but gives
every router the Leases and EndpointSlices of all services in its namespace: one compromised router would then
control all of them. The operator creates these objects, so it has access to them anyway.

`delete` of a service's children: a new service adopts those that `kubectl delete --cascade=orphan` left, and the admission
plugin OwnerReferencesPermissionEnforcement (on in OpenShift) lets only those change an object's owners who may delete it. The
operator deletes none but EndpointSlices whose Service has changed.
*/}}
{{- define "fulcrum.operatorRules" -}}
- apiGroups: [fulcrum.dev]
  resources: [pdservices]
  verbs: [get, list, watch]
- apiGroups: [fulcrum.dev]
  resources: [qostiers]
  verbs: [list, watch]
- apiGroups: [fulcrum.dev]
  resources: [pdpools, pdinstances]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [fulcrum.dev]
  resources: [pdassignments]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [fulcrum.dev]
  resources: [pdservices/status, pdpools/status, pdinstances/status, pdassignments/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, get, patch]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [create, delete, get, list, patch, watch]
{{ include "fulcrum.leaseRules" . }}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [delete]
{{- end -}}

{{/* Nodes are of the cluster: an operator of one namespace does not see which are being drained. */}}
{{- define "fulcrum.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end -}}

{{- define "fulcrum.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create, get, patch]
{{- end -}}

{{- define "fulcrum.autoscalerRules" -}}
- apiGroups: [fulcrum.dev]
  resources: [pdservices, pdpools, pdinstances, pdassignments]
  verbs: [list, watch]
- apiGroups: [fulcrum.dev]
  resources: [pdassignments]
  verbs: [get, patch]
{{- end -}}
