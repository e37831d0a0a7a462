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

{{/* metadata of an object: the dict has root, and where they differ from the usual name and namespace, suffix and labels. */}}
{{- define "kvtierd.metadata" -}}
name: {{ include "kvtierd.fullname" .root }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "kvtierd.labels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
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

{{/* Memory of the daemon's container: the daemon faults the pool in, so the pool counts here. */}}
{{- define "kvtierd.memory" -}}
{{- $cpu := include "kvtierd.mib" .Values.cpu.capacity | int64 }}
{{- $nvme := include "kvtierd.mib" .Values.nvme.capacity | int64 }}
{{- $overhead := add 2048 (div (add $cpu $nvme) 2048) }}
{{- with .Values.memoryOverhead }}
{{- $overhead = include "kvtierd.mib" . | int64 }}
{{- end }}
{{- add $cpu $overhead }}Mi
{{- end }}

{{/* kvtierd.toml: what the chart works out, under what the user wrote. */}}
{{- define "kvtierd.config" -}}
{{- $folders := list }}
{{- range $i, $_ := include "kvtierd.nvmeVolumes" . | fromJsonArray }}
{{- $folders = append $folders (printf "/nvme/%d" $i) }}
{{- end }}
{{- $nvme := dict "capacity" "0MiB" }}
{{- if include "kvtierd.nvme" . }}
{{- $nvme = dict "capacity" .Values.nvme.capacity "reserve" .Values.nvme.reserve "folders" $folders }}
{{- if .Values.nvme.encryptionSecretName }}
{{- $_ := set $nvme "encryption_key_file" "/etc/kvtierd-encryption/nvme.key" }}
{{- end }}
{{- end }}
{{- $server := dict
  "socket" (printf "%s/kvtierd.sock" .Values.socketHostPath)
  "metrics" (printf "0.0.0.0:%d" (int .Values.metrics.port))
  "drain_timeout" (printf "%ds" (int .Values.drainTimeoutSeconds)) }}
{{- with .Values.listen }}
{{- if .port }}
{{- $_ := set $server "listen" (printf "0.0.0.0:%d" (int .port)) }}
{{- if $.Values.tls.secretName }}
{{- $_ := set $server "tls_cert" "/etc/kvtierd-tls/tls.crt" }}
{{- $_ := set $server "tls_key" "/etc/kvtierd-tls/tls.key" }}
{{- if $.Values.tls.clientCA }}
{{- $_ := set $server "tls_client_ca" "/etc/kvtierd-tls/ca.crt" }}
{{- end }}
{{- else if .insecure }}
{{- $_ := set $server "insecure" true }}
{{- else }}
{{- fail "listen.port opens the API on TCP: set tls.secretName to a Secret with tls.crt and tls.key, or listen.insecure to true" }}
{{- end }}
{{- else if or $.Values.tls.secretName .insecure }}
{{- fail "tls.secretName and listen.insecure are for the API on TCP: set listen.port too, or leave them out" }}
{{- end }}
{{- end }}
{{- if .Values.tokens.secretName }}
{{- $_ := set $server "token_file" "/etc/kvtierd-tokens/tokens.toml" }}
{{- end }}
{{- if and .Values.tls.clientCA (not .Values.tls.secretName) }}
{{- fail "tls.clientCA takes ca.crt of the Secret that tls.secretName names: set that too" }}
{{- end }}
{{- $cpu := dict "capacity" .Values.cpu.capacity }}
{{- if .Values.cpu.keep }}
{{- $_ := set $cpu "keep" "/kept" }}
{{- end }}
{{- $own := dict "cpu" $cpu "nvme" $nvme "server" $server }}
{{- $refused := dict
  "cpu" (list "capacity" "keep")
  "nvme" (list "capacity" "reserve" "folders" "encryption_key_file")
  "server" (list "socket" "descriptor_socket" "metrics" "drain_timeout" "listen" "insecure" "tls_cert" "tls_key" "tls_client_ca" "token_file") }}
{{- range $section, $keys := $refused }}
{{- range $key := $keys }}
{{- if hasKey (default dict (get $.Values.config $section)) $key }}
{{- fail (printf "config.%s.%s is worked out by the chart: set the chart's own value instead" $section $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- $all := mergeOverwrite $own (deepCopy .Values.config) }}
{{- with .Values.tenants }}
{{- $_ := set $all "tenants" (deepCopy .) }}
{{- end }}
{{- toToml $all }}
{{- end }}
