{{/* Names, labels and images. */}}
{{- define "batchyard.name" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "batchyard.selector" -}}
app.kubernetes.io/name: batchyard
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "batchyard.labels" -}}
{{ include "batchyard.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Of a dict with `root` and `of`, one of the values' images. */}}
{{- define "batchyard.image" -}}
image: {{ printf "%s:%s" .of.repository (.of.tag | default .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .of.pullPolicy }}
{{- end }}

{{- define "batchyard.secret" -}}
{{- .Values.existingSecret | default (include "batchyard.name" .) -}}
{{- end }}

{{- define "batchyard.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "batchyard.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end }}

{{/* The name of a runner's objects: a pool may have characters that Kubernetes refuses. */}}
{{- define "batchyard.runner" -}}
{{- $pool := .pool | lower | replace "_" "-" | replace "." "-" -}}
{{- printf "%s-runner-%s" (include "batchyard.name" .root) $pool | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{/* Of a dict with `root` and `of`, an entry of `runners`: the entry with the defaults, as YAML. */}}
{{- define "batchyard.runnerValues" -}}
{{- $all := deepCopy .root.Values.runnerDefaults }}
{{- range $name, $value := .of }}
{{- if eq $name "keda" }}
{{- range $inner, $each := $value }}
{{- $_ := set $all.keda $inner $each }}
{{- end }}
{{- else }}
{{- $_ := set $all $name $value }}
{{- end }}
{{- end }}
{{- toYaml $all }}
{{- end }}
