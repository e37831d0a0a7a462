{{/* Parts of a pod that has the daemon, for the DaemonSet and for sidecars. */}}

{{/* JSON list of the volumes of the NVMe tier, each mounted at /nvme/<index>; empty when the tier is off. */}}
{{- define "kvtierd.nvmeVolumes" -}}
{{- $volumes := list }}
{{- if include "kvtierd.nvme" . }}
{{- $kind := .Values.sidecar.volume }}
{{- if eq .Values.mode "daemonset" }}
{{- $kind = "hostPath" }}
{{- end }}
{{- $capacity := include "kvtierd.mib" .Values.nvme.capacity | int64 }}
{{- /* Some room beside the capacity: a pod that went over the size limit would be evicted. */}}
{{- $size := printf "%dMi" (add $capacity (div $capacity 64) (include "kvtierd.mib" .Values.nvme.reserve | int64) 1024) }}
{{- if eq $kind "hostPath" }}
{{- range $i, $path := .Values.nvme.hostPaths }}
{{- $volumes = append $volumes (dict "name" (printf "kvtierd-nvme-%d" $i) "hostPath" (dict "path" $path "type" "DirectoryOrCreate")) }}
{{- end }}
{{- else if eq $kind "emptyDir" }}
{{- $volumes = list (dict "name" "kvtierd-nvme-0" "emptyDir" (dict "sizeLimit" $size)) }}
{{- else if eq $kind "claim" }}
{{- $claim := required "sidecar.volume is claim: name an existing claim in sidecar.claimName" .Values.sidecar.claimName }}
{{- $volumes = list (dict "name" "kvtierd-nvme-0" "persistentVolumeClaim" (dict "claimName" $claim)) }}
{{- else }}
{{- $spec := dict "accessModes" (list "ReadWriteOnce") "resources" (dict "requests" (dict "storage" $size)) }}
{{- with .Values.sidecar.storageClassName }}
{{- $_ := set $spec "storageClassName" . }}
{{- end }}
{{- $volumes = list (dict "name" "kvtierd-nvme-0" "ephemeral" (dict "volumeClaimTemplate" (dict "spec" $spec))) }}
{{- end }}
{{- end }}
{{- toJson $volumes }}
{{- end }}

{{/* JSON list of the volumes that belong to the node, whose folders Kubernetes makes as root. */}}
{{- define "kvtierd.nodeVolumes" -}}
{{- $volumes := list }}
{{- range $i, $volume := include "kvtierd.nvmeVolumes" . | fromJsonArray }}
{{- if hasKey $volume "hostPath" }}
{{- $volumes = append $volumes (dict "name" $volume.name "mountPath" (printf "/nvme/%d" $i)) }}
{{- end }}
{{- end }}
{{- if eq .Values.mode "daemonset" }}
{{- if .Values.cpu.keep }}
{{- $volumes = prepend $volumes (dict "name" "kvtierd-memory" "mountPath" "/kept") }}
{{- end }}
{{- $volumes = prepend $volumes (dict "name" "kvtierd-socket" "mountPath" .Values.socketHostPath) }}
{{- end }}
{{- toJson $volumes }}
{{- end }}

{{- define "kvtierd.volumes" -}}
- name: kvtierd-config
  configMap:
    name: {{ include "kvtierd.fullname" . }}
- name: kvtierd-tmp
  emptyDir:
    sizeLimit: 64Mi
- name: kvtierd-socket
  {{- if eq .Values.mode "daemonset" }}
  hostPath:
    path: {{ .Values.socketHostPath }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
  {{- end }}
{{- if .Values.cpu.keep }}
- name: kvtierd-memory
  {{- if eq .Values.mode "daemonset" }}
  hostPath:
    path: {{ .Values.cpu.keepHostPath }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir:
    medium: Memory
    # the pool, and the index between two daemons
    sizeLimit: {{ printf "%dMi" (add (include "kvtierd.mib" .Values.cpu.capacity | int64) 1024) }}
  {{- end }}
{{- end }}
{{- with .Values.tls.secretName }}
- name: kvtierd-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.tokens.secretName }}
- name: kvtierd-tokens
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.nvme.encryptionSecretName }}
- name: kvtierd-encryption
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with include "kvtierd.nvmeVolumes" . | fromJsonArray }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The pod's own context: volumes that Kubernetes makes belong to the daemon's group. */}}
{{- define "kvtierd.podSecurityContext" -}}
fsGroup: {{ int64 .Values.runAsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* An init container that gives folders of the node to the daemon's user; nothing where there are none. */}}
{{- define "kvtierd.foldersContainer" -}}
{{- with include "kvtierd.nodeVolumes" . | fromJsonArray }}
# Kubernetes makes hostPath folders as root; the daemon does not run as root.
- name: kvtierd-folders
  image: {{ include "kvtierd.image" $ }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  command:
    - chown
    - {{ printf "%d:%d" (int64 $.Values.runAsUser) (int64 $.Values.runAsGroup) | quote }}
    {{- range . }}
    - {{ .mountPath }}
    {{- end }}
  resources:
    requests:
      cpu: 10m
      memory: 16Mi
    limits:
      memory: 64Mi
  securityContext:
    runAsUser: 0
    runAsNonRoot: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      add: [CHOWN]
  volumeMounts:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{/* The daemon's container, without probes that would hold other containers of a pod back. */}}
{{- define "kvtierd.container" -}}
name: kvtierd
image: {{ include "kvtierd.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - name: KVTIERD_CONFIG
    value: /etc/kvtierd/kvtierd.toml
  - name: KVTIERD_ADDRESS # for kvtierd status and the like in this container
    value: unix:{{ .Values.socketHostPath }}/kvtierd.sock
  {{- if .Values.gpu.enabled }}
  # All GPUs that the container runtime may show, without a GPU of the scheduler's.
  - name: NVIDIA_VISIBLE_DEVICES
    value: all
  - name: NVIDIA_DRIVER_CAPABILITIES
    value: compute,utility
  {{- end }}
ports:
  - name: kv-metrics
    containerPort: {{ .Values.metrics.port }}
  {{- with .Values.listen.port }}
  - name: kv-api
    containerPort: {{ . }}
  {{- end }}
# Answers from the start on, also while the index is read, so it needs no start-up probe.
livenessProbe:
  httpGet:
    path: /healthz
    port: kv-metrics
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
resources:
  requests:
    cpu: {{ .Values.cpuRequest | quote }}
    memory: {{ include "kvtierd.memory" . }}
  limits:
    {{- with .Values.cpuLimit }}
    cpu: {{ . | quote }}
    {{- end }}
    # cpu.capacity and the overhead: the daemon faults the pool in, so the pool counts here
    memory: {{ include "kvtierd.memory" . }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.runAsUser }}
  runAsGroup: {{ int64 .Values.runAsGroup }}
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: kvtierd-config
    mountPath: /etc/kvtierd
    readOnly: true
  - name: kvtierd-tmp
    mountPath: /tmp
  - name: kvtierd-socket
    mountPath: {{ .Values.socketHostPath }}
  {{- if .Values.cpu.keep }}
  - name: kvtierd-memory
    mountPath: /kept
  {{- end }}
  {{- if .Values.tls.secretName }}
  - name: kvtierd-tls
    mountPath: /etc/kvtierd-tls
    readOnly: true
  {{- end }}
  {{- if .Values.tokens.secretName }}
  - name: kvtierd-tokens
    mountPath: /etc/kvtierd-tokens
    readOnly: true
  {{- end }}
  {{- if .Values.nvme.encryptionSecretName }}
  - name: kvtierd-encryption
    mountPath: /etc/kvtierd-encryption
    readOnly: true
  {{- end }}
  {{- range $i, $volume := include "kvtierd.nvmeVolumes" . | fromJsonArray }}
  - name: {{ $volume.name }}
    mountPath: /nvme/{{ $i }}
  {{- end }}
{{- end }}
