{{- define "vllm.fullname" -}}
{{- $name := .Release.Name }}
{{- if not (contains .Chart.Name .Release.Name) }}
{{- $name = printf "%s-%s" .Release.Name .Chart.Name }}
{{- end }}
{{- $name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "vllm.selector" -}}
app.kubernetes.io/name: vllm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vllm.labels" -}}
{{ include "vllm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* "32GiB" as Kubernetes writes it. */}}
{{- define "vllm.quantity" -}}
{{ trimSuffix "B" . }}
{{- end }}
