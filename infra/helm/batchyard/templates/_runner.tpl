{{/*
Of a dict with `root`, `runner`, an entry of `runners` with its defaults, and `isNode`: the pod of an
engine, or of a node of one, which waits for that pod.
*/}}
{{- define "batchyard.runnerPod" -}}
{{- $root := .root }}
{{- $runner := .runner -}}
metadata:
  labels:
    {{- include "batchyard.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ include "batchyard.runnerComponent" $runner | quote }}
  annotations:
    {{- include "batchyard.checksums" $root | nindent 4 }}
    {{- with $runner.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "batchyard.pod" $root | nindent 2 }}
  serviceAccountName: {{ include "batchyard.serviceAccount" $root }}
  {{- with $runner.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  # Longer than the drain, and the time that the engine takes to end after it.
  terminationGracePeriodSeconds: {{ add (int $runner.drainSeconds) 60 }}
  containers:
    - name: runner
      {{- include "batchyard.image" (dict "root" $root "of" $root.Values.runnerImage) | nindent 6 }}
      {{- if .isNode }}
      # Its leader is in LWS_LEADER_ADDRESS.
      args: [batchyard, engine-node]
      {{- else }}
      # One engine: it has all GPUs of the pod.
      args: [batchyard, worker, {{ $runner.pool | quote }}, --limit, "1"{{ include "batchyard.metricsArgs" $root }}]
      {{- end }}
      env:
        {{- include "batchyard.environment" $root | nindent 8 }}
        - { name: BATCHYARD_DRAIN_SECONDS, value: {{ $runner.drainSeconds | int | toString | quote }} }
        {{- if and $root.Values.live.enabled (not .isNode) }}
        - name: BATCHYARD_LIVE_HOST
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        - { name: BATCHYARD_LIVE_PORT, value: {{ $root.Values.live.port | int | toString | quote }} }
        {{- end }}
        {{- if $root.Values.modelCache.enabled }}
        - { name: HF_HOME, value: /models/huggingface }
        - { name: VLLM_CACHE_ROOT, value: /models/vllm }
        {{- end }}
        {{- range $variable, $value := $runner.env }}
        - { name: {{ $variable }}, value: {{ $value | toString | quote }} }
        {{- end }}
      {{- include "batchyard.envFrom" $root | nindent 6 }}
      {{- if not .isNode }}
      {{- with include "batchyard.runnerPorts" $root }}
      ports: {{- . | nindent 8 }}
      {{- end }}
      {{- end }}
      {{- include "batchyard.securityContext" $root | nindent 6 }}
      {{- $resources := deepCopy $runner.resources }}
      {{- if $runner.gpus }}
      {{- $gpus := dict $runner.gpuResource (int $runner.gpus) }}
      {{- $_ := set $resources "limits" (merge $gpus ($resources.limits | default dict)) }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        {{- include "batchyard.mounts" $root | nindent 8 }}
        - { name: shm, mountPath: /dev/shm }
        {{- if $root.Values.modelCache.enabled }}
        - { name: models, mountPath: /models }
        {{- end }}
  volumes:
    {{- include "batchyard.volumes" (dict "root" $root "size" $runner.scratchSize) | nindent 4 }}
    - name: shm
      emptyDir: { medium: Memory, sizeLimit: {{ $runner.shmSize }} }
    {{- if $root.Values.modelCache.enabled }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ $root.Values.modelCache.existingClaim | default (printf "%s-models" (include "batchyard.name" $root)) }}
    {{- end }}
  {{- include "batchyard.placement" $runner | nindent 2 }}
{{- end }}

{{- define "batchyard.runnerComponent" -}}
{{- printf "runner-%s" .pool | trunc 63 -}}
{{- end }}
