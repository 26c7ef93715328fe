{{/* What all pods have. */}}
{{- define "batchyard.pod" -}}
# A Service named batchyard-api would set BATCHYARD_API_PORT=tcp://… in every pod.
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end }}

{{/* Of one of `api`, `control` and `runners`: where its pods run. */}}
{{- define "batchyard.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "batchyard.securityContext" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{/* The folders: the image's user has no home, and the image cannot be written. */}}
{{- define "batchyard.folders" -}}
- { name: BATCHYARD_HOME, value: /var/lib/batchyard }
- { name: HOME, value: /var/lib/batchyard }
- { name: PREFECT_HOME, value: /var/lib/batchyard/prefect }
# Libraries ask for the user's name, which a number without an entry in /etc/passwd has not.
- { name: USER, value: batchyard }
{{- end }}

{{/* The variables of processes that read the file of settings. */}}
{{- define "batchyard.environment" -}}
{{ include "batchyard.folders" . }}
- { name: BATCHYARD_CONFIG, value: /etc/batchyard/batchyard.toml }
# By name, so that a pod does not start without them: it would use a database and a key of its own,
# in its home, which is lost with it.
{{- range list "BATCHYARD_DATABASE_URL" "BATCHYARD_SECRET_KEY" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef: { name: {{ include "batchyard.secret" $ }}, key: {{ . }} }
{{- end }}
- { name: PREFECT_API_URL, value: {{ required "prefect.apiUrl is required" .Values.prefect.apiUrl | quote }} }
{{- with .Values.s3.endpointUrl }}
- { name: AWS_ENDPOINT_URL, value: {{ . | quote }} }
{{- end }}
{{- with .Values.s3.region }}
- { name: AWS_DEFAULT_REGION, value: {{ . | quote }} }
{{- end }}
{{- end }}

{{/* What the commands of workers end with, and the port that it opens. */}}
{{- define "batchyard.metricsArgs" -}}
{{- if .Values.metrics.enabled }}, --metrics-host, 0.0.0.0, --metrics-port, {{ .Values.metrics.port | int | toString | quote }}{{ end }}
{{- end }}

{{- define "batchyard.metricsPort" -}}
{{- if .Values.metrics.enabled -}}
- { name: metrics, containerPort: {{ .Values.metrics.port | int }} }
{{- end }}
{{- end }}

{{- define "batchyard.runnerPorts" -}}
{{- include "batchyard.metricsPort" . }}
{{- if .Values.live.enabled }}
- { name: live, containerPort: {{ .Values.live.port | int }} }
{{- end }}
{{- end }}

{{- define "batchyard.envFrom" -}}
envFrom:
  - secretRef: { name: {{ include "batchyard.secret" . }} }
{{- end }}

{{- define "batchyard.mounts" -}}
- { name: settings, mountPath: /etc/batchyard, readOnly: true }
- { name: home, mountPath: /var/lib/batchyard }
- { name: tmp, mountPath: /tmp }
{{- end }}

{{/* Of a dict with `root` and `size`. */}}
{{- define "batchyard.volumes" -}}
- name: settings
  configMap: { name: {{ include "batchyard.name" .root }} }
- name: home
  emptyDir: { sizeLimit: {{ .size }} }
- name: tmp
  emptyDir: { sizeLimit: 4Gi }
{{- end }}

{{/*
Pods start again when the settings or the secrets of the chart have changed, but not for a model: GPU
pods would drain one after the other. What they read of models is in Prefect's blocks.
*/}}
{{- define "batchyard.checksums" -}}
checksum/settings: {{ list .Values.storage .Values.settings | toJson | sha256sum }}
checksum/secret: {{ include (print $.Template.BasePath "/secret.yaml") . | sha256sum }}
{{- end }}
