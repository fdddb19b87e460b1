{{/* What every pod of this chart has around its container. */}}
{{- define "emqtimerd.podSettings" -}}
serviceAccountName: {{ include "emqtimerd.serviceAccountName" . | quote }}
automountServiceAccountToken: false
# The variables that a Service called emqtimerd would give look like settings.
enableServiceLinks: false
{{- with include "emqtimerd.pullSecrets" . | fromYamlArray }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: config
    configMap:
      name: {{ include "emqtimerd.name" . | quote }}
  {{- with .Values.auth.existingSecret }}
  - name: password
    secret:
      secretName: {{ . | quote }}
      # Readable for the pod's group alone, which fsGroup makes the daemon's.
      defaultMode: 0440
      items:
        - key: {{ $.Values.auth.passwordKey | quote }}
          path: password
  {{- end }}
  {{- with .Values.auth.sentinel.existingSecret }}
  - name: sentinel-password
    secret:
      secretName: {{ . | quote }}
      defaultMode: 0440
      items:
        - key: {{ $.Values.auth.sentinel.passwordKey | quote }}
          path: password
  {{- end }}
  {{- with .Values.tls.existingSecret }}
  - name: tls
    secret:
      secretName: {{ . | quote }}
      defaultMode: 0440
  {{- end }}
  {{- with .Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* What every container of this chart has besides its arguments. */}}
{{- define "emqtimerd.containerSettings" -}}
image: {{ include "emqtimerd.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy | quote }}
# `kubectl describe pod` then shows the last lines of the log, which say why it ended.
terminationMessagePolicy: FallbackToLogsOnError
{{- with .Values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  # A directory each, none inside another, and no subPath: that would never see a change.
  - name: config
    mountPath: /etc/emqtimerd
    readOnly: true
  {{- if .Values.auth.existingSecret }}
  - name: password
    mountPath: /run/secrets/emqtimerd/node
    readOnly: true
  {{- end }}
  {{- if .Values.auth.sentinel.existingSecret }}
  - name: sentinel-password
    mountPath: /run/secrets/emqtimerd/sentinel
    readOnly: true
  {{- end }}
  {{- if .Values.tls.existingSecret }}
  - name: tls
    mountPath: /run/secrets/emqtimerd/tls
    readOnly: true
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The environment of every container: where things are mounted. Never a secret itself. */}}
{{- define "emqtimerd.env" -}}
- name: EMQTIMERD_CONFIG
  value: /etc/emqtimerd/emqtimerd.toml
{{- if .Values.auth.existingSecret }}
- name: EMQTIMERD_NODE__PASSWORD_FILE
  value: /run/secrets/emqtimerd/node/password
{{- end }}
{{- if .Values.auth.sentinel.existingSecret }}
- name: EMQTIMERD_NODE__SENTINEL__PASSWORD_FILE
  value: /run/secrets/emqtimerd/sentinel/password
{{- end }}
{{- with .Values.tls }}
{{- if .existingSecret }}
{{- with .caKey }}
- name: EMQTIMERD_NODE__TLS__CA_FILE
  value: {{ printf "/run/secrets/emqtimerd/tls/%s" . | quote }}
{{- end }}
{{- with .certKey }}
- name: EMQTIMERD_NODE__TLS__CERT_FILE
  value: {{ printf "/run/secrets/emqtimerd/tls/%s" . | quote }}
{{- end }}
{{- with .keyKey }}
- name: EMQTIMERD_NODE__TLS__KEY_FILE
  value: {{ printf "/run/secrets/emqtimerd/tls/%s" . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The daemon's pod, the same in a Deployment and in a StatefulSet. */}}
{{- define "emqtimerd.daemonPod" -}}
metadata:
  labels:
    {{- include "emqtimerd.daemonLabels" . | nindent 4 }}
    app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
    {{- with .Values.extraLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Another configuration is another pod: the daemon's settings never change behind a rollout's back.
    checksum/config: {{ include "emqtimerd.config" . | sha256sum }}
    kubectl.kubernetes.io/default-container: emqtimerd
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "emqtimerd.podSettings" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "emqtimerd.terminationSeconds" . }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .Values.topologySpread.enabled }}
  topologySpreadConstraints:
    {{- range .Values.topologySpread.topologyKeys }}
    - topologyKey: {{ . | quote }}
      maxSkew: 1
      whenUnsatisfiable: {{ $.Values.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "emqtimerd.daemonLabels" $ | nindent 10 }}
      {{- if not $.Values.sharding.enabled }}
      # Counts a rollout's new pods among themselves, not with those that they replace.
      matchLabelKeys: [pod-template-hash]
      {{- end }}
    {{- end }}
  {{- end }}
  containers:
    - name: emqtimerd
      args: [run]
      {{- include "emqtimerd.containerSettings" . | nindent 6 }}
      env:
        {{- include "emqtimerd.env" . | nindent 8 }}
        - name: EMQTIMERD_HTTP__LISTEN
          value: {{ printf "%s:%d" .Values.http.address (int .Values.http.port) | quote }}
        {{- if .Values.sharding.enabled }}
        # Of a name such as emqtimerd-2 the daemon takes the number at the end.
        - name: EMQTIMERD_SHARD__INDEX
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: EMQTIMERD_SHARD__COUNT
          value: {{ .Values.replicas | int | quote }}
        {{- end }}
      ports:
        - name: http
          containerPort: {{ int .Values.http.port }}
          protocol: TCP
      # Until it answers once, the other two probes wait: a slow start is no reason for a restart.
      startupProbe:
        httpGet:
          path: /healthz
          port: http
        {{- toYaml .Values.startupProbe | nindent 8 }}
      # The process alone: a node that is down must not have the daemon restarted.
      livenessProbe:
        httpGet:
          path: /healthz
          port: http
        {{- toYaml .Values.livenessProbe | nindent 8 }}
      # The work: the node answers and the last round is recent.
      readinessProbe:
        httpGet:
          path: /readyz
          port: http
        {{- toYaml .Values.readinessProbe | nindent 8 }}
      {{- with .Values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
{{- end }}
