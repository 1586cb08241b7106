{{/* Prefix of all names: at most 46 characters, which leaves room for "-autoscaler" and a hash. */}}
{{- define "fulcrum.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 46 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 46 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 46 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "fulcrum.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of all objects; takes (dict "root" $ "component" "operator"). */}}
{{- define "fulcrum.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: fulcrum
{{ include "fulcrum.selector" . }}
{{- end -}}

{{/* Labels of pods. None depends on the chart's version: a changed label would restart all pods. */}}
{{- define "fulcrum.podLabels" -}}
app.kubernetes.io/part-of: fulcrum
{{ include "fulcrum.selector" . }}
{{- end -}}

{{- define "fulcrum.selector" -}}
app.kubernetes.io/name: {{ include "fulcrum.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "fulcrum.image" -}}
{{- $repository := required "image.repository is required: no image is published; build one with the Dockerfile, push it, and set image.repository=REGISTRY/fulcrum with image.tag or image.digest" .Values.image.repository -}}
{{- if not (regexMatch "^(localhost|[^/]*[.:][^/]*)/." $repository) -}}
{{- fail (printf "image.repository %s names no registry: each node would choose one; write REGISTRY/%s, such as docker.io/team/fulcrum" $repository $repository) -}}
{{- end -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The container's part of the "restricted" Pod Security Standard, and a read-only root file system. */}}
{{- define "fulcrum.containerSecurityContext" -}}
{{- $default := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) "readOnlyRootFilesystem" true "runAsNonRoot" true -}}
{{- toYaml (mergeOverwrite $default (.securityContext | default dict)) -}}
{{- end -}}

{{/* Environment variables of a container that sends spans; nothing without a receiver. */}}
{{- define "fulcrum.tracingEnv" -}}
{{- with .Values.tracing.endpoint -}}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $.Values.tracing.samplingRatio | quote }}
{{- end }}
{{- end -}}

{{/* Strategic merge patch of the pods of all routers, from the values under `router` and `tracing`. */}}
{{- define "fulcrum.routerTemplate" -}}
{{- $spec := dict -}}
{{- range $name := list "nodeSelector" "tolerations" "affinity" "priorityClassName" -}}
{{- with index $.Values.router $name -}}
{{- $_ := set $spec $name . -}}
{{- end -}}
{{- end -}}
{{- with include "fulcrum.tracingEnv" . -}}
{{- $_ := set $spec "containers" (list (dict "name" "router" "env" (fromYamlArray .))) -}}
{{- end -}}
{{- $template := dict -}}
{{- with $spec -}}
{{- $_ := set $template "spec" . -}}
{{- end -}}
{{- with .Values.router.podAnnotations -}}
{{- $_ := set $template "metadata" (dict "annotations" .) -}}
{{- end -}}
{{- if $template -}}
{{- toJson $template -}}
{{- end -}}
{{- end -}}

{{/* Volume mounts of a program's container and their volumes: temporary files, and the token for the routers' state ports. */}}
{{- define "fulcrum.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: router-state-token
  mountPath: /var/run/secrets/fulcrum.dev
  readOnly: true
{{- end -}}

{{- define "fulcrum.volumes" -}}
- name: tmp
  emptyDir: {}
- name: router-state-token
  projected:
    sources:
      - serviceAccountToken:
          audience: fulcrum.dev/router-state
          expirationSeconds: 3600
          path: token
      {{- with .Values.router.stateCASecret }}
      - secret:
          name: {{ . }}
          items: [{key: ca.crt, path: state-ca.crt}]
          optional: true
      {{- end }}
{{- end -}}

{{/* namespaceSelector of a PodMonitor: the namespaces whose services the operator watches. */}}
{{- define "fulcrum.watchedNamespaces" -}}
{{- if .Values.watchNamespace -}}
matchNames: [{{ .Values.watchNamespace }}]
{{- else -}}
any: true
{{- end -}}
{{- end -}}
