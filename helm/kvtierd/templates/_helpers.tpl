{{- define "kvtierd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kvtierd.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "kvtierd.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvtierd.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvtierd.selector" -}}
app.kubernetes.io/name: {{ include "kvtierd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvtierd.labels" -}}
{{ include "kvtierd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvtierd.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}
{{- end }}

{{/* MiB of a size such as "8GiB"; the schema has checked the form. */}}
{{- define "kvtierd.mib" -}}
{{- $number := regexFind "^[0-9]+" . | int64 }}
{{- $unit := regexFind "[A-Z]" . }}
{{- mul $number (get (dict "M" 1 "G" 1024 "T" 1048576) $unit) }}
{{- end }}

{{/* "true" when the NVMe tier is on. */}}
{{- define "kvtierd.nvme" -}}
{{- if gt (include "kvtierd.mib" .Values.nvme.capacity | int64) 0 }}true{{ end }}
{{- end }}

{{/* kvtierd.toml: what the chart works out, under what the user wrote. */}}
{{- define "kvtierd.config" -}}
{{- $folders := list }}
{{- range $i, $path := .Values.nvme.hostPaths }}
{{- $folders = append $folders (printf "/nvme/%d" $i) }}
{{- end }}
{{- $nvme := dict "capacity" "0MiB" }}
{{- if include "kvtierd.nvme" . }}
{{- $nvme = dict "capacity" .Values.nvme.capacity "reserve" .Values.nvme.reserve "folders" $folders }}
{{- end }}
{{- $own := dict
  "cpu" (dict "capacity" .Values.cpu.capacity)
  "nvme" $nvme
  "server" (dict
    "socket" (printf "%s/kvtierd.sock" .Values.socketHostPath)
    "metrics" (printf "0.0.0.0:%d" (int .Values.metrics.port))
    "drain_timeout" (printf "%ds" (int .Values.drainTimeoutSeconds))) }}
{{- range list "cpu" "nvme" "server" }}
{{- $section := . }}
{{- range $key := keys (get $own $section) }}
{{- if hasKey (default dict (get $.Values.config $section)) $key }}
{{- fail (printf "config.%s.%s is worked out by the chart: set the chart's own value instead" $section $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- toToml (mergeOverwrite $own (deepCopy .Values.config)) }}
{{- end }}
