{{/*
The daemon as a sidecar of another chart's pods, without an injector. That chart has this one as a dependency, with
kvtierd.mode: sidecar in its values, and includes these templates with .Subcharts.kvtierd as their argument:

  kvtierd.sidecar.annotations      of the pod: a changed configuration restarts it
  kvtierd.sidecar.securityContext  of the pod
  kvtierd.sidecar.gracePeriod      the pod's terminationGracePeriodSeconds, a number
  kvtierd.sidecar.runtimeClass     the pod's runtimeClassName, empty without gpu.enabled
  kvtierd.sidecar.initContainers   items; a sidecar is an init container that goes on (Kubernetes 1.29 or newer)
  kvtierd.sidecar.volumes          items
  kvtierd.sidecar.strategy         of the Deployment
  kvtierd.sidecar.env              items, for the engine's container
  kvtierd.sidecar.volumeMounts     items, for the engine's container
  kvtierd.sidecar.transferConfig   JSON for vLLM's --kv-transfer-config

The engine runs as root or as runAsUser. helm/vllm-kvtierd uses all of them.
*/}}

{{- define "kvtierd.sidecar.check" -}}
{{- if ne .Values.mode "sidecar" }}
{{- fail "templates kvtierd.sidecar.* are for mode: sidecar; set it in the values of the kvtierd chart (kvtierd.mode)" }}
{{- end }}
{{- end }}

{{- define "kvtierd.sidecar.annotations" -}}
{{- include "kvtierd.sidecar.check" . -}}
checksum/kvtierd-config: {{ include "kvtierd.config" . | sha256sum }}
{{- end }}

{{- define "kvtierd.sidecar.securityContext" -}}
{{- include "kvtierd.sidecar.check" . -}}
{{- include "kvtierd.podSecurityContext" . }}
{{- end }}

{{- define "kvtierd.sidecar.gracePeriod" -}}
{{- add .Values.drainTimeoutSeconds 30 }}
{{- end }}

{{- define "kvtierd.sidecar.runtimeClass" -}}
{{- if .Values.gpu.enabled }}{{ .Values.gpu.runtimeClassName }}{{ end }}
{{- end }}

{{- define "kvtierd.sidecar.initContainers" -}}
{{- include "kvtierd.sidecar.check" . -}}
{{- with include "kvtierd.foldersContainer" . }}
{{- . | trim }}
{{ end -}}
# No start-up or readiness probe on purpose: either would hold the engine back while the daemon is not ready, and the engine
# serves without it.
- restartPolicy: Always
  {{- include "kvtierd.container" . | nindent 2 }}
{{- end }}

{{- define "kvtierd.sidecar.volumes" -}}
{{- include "kvtierd.sidecar.check" . -}}
{{- include "kvtierd.volumes" . }}
{{- end }}

{{/* Two daemons cannot have one folder: where the folder outlives the pod, the old pod goes first. */}}
{{- define "kvtierd.sidecar.strategy" -}}
{{- if and (include "kvtierd.nvme" .) (has .Values.sidecar.volume (list "hostPath" "claim")) -}}
type: Recreate
{{- else -}}
type: RollingUpdate
{{- end }}
{{- end }}

{{- define "kvtierd.sidecar.env" -}}
- name: KVTIERD_ADDRESS
  value: unix:{{ .Values.socketHostPath }}/kvtierd.sock
{{- end }}

{{- define "kvtierd.sidecar.volumeMounts" -}}
- name: kvtierd-socket
  mountPath: {{ .Values.socketHostPath }}
{{- end }}

{{- define "kvtierd.sidecar.transferConfig" -}}
{{- $config := dict
  "kv_connector" "KvtierdConnector"
  "kv_connector_module_path" "kvtierd.connectors.vllm"
  "kv_role" "kv_both"
  "kv_load_failure_policy" "recompute" }}
{{- with .Values.sidecar.connector }}
{{- $_ := set $config "kv_connector_extra_config" . }}
{{- end }}
{{- toJson $config }}
{{- end }}
