{{/*
What the parts may do. A test holds each rule to what the API server's audit log says was used.

The operator makes a Role for each service's router, so the API server asks it to hold what is in there itself.
The other way, a ClusterRole for all routers and the right to bind it, grants the operator less, but every router
the Leases and the endpoints of all services of its namespace: whoever takes over one router then takes over all.
The operator sees these anyway, as it makes them.
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
  verbs: [create, get, list, patch, watch]
- apiGroups: [fulcrum.dev]
  resources: [pdservices/status, pdpools/status, pdinstances/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, get, patch]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [create, list, patch, watch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [create, list, patch, watch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, list, patch, watch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, list, patch, watch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [create, list, patch, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [create, get, list, patch, watch]
{{ include "fulcrum.leaseRules" . }}
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
