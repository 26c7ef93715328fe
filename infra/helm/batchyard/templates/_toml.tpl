{{/* A value as TOML. JSON's strings are TOML's; numbers of values are floats, and 2.0 is no limit. */}}
{{- define "batchyard.toml" -}}
{{- if kindIs "map" . -}}
{ {{- $first := true -}}
{{- range $name, $value := . -}}
{{- if not $first }},{{ end }} {{ $name | toJson }} = {{ include "batchyard.toml" $value }}
{{- $first = false -}}
{{- end }} }
{{- else if kindIs "slice" . -}}
[{{- range $index, $value := . -}}
{{- if $index }}, {{ end }}{{ include "batchyard.toml" $value }}
{{- end -}}]
{{- else if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end }}
