{{/*
The name of everything in this release. At most 47 characters: "-once" comes behind it, and the name
of a CronJob may have 52 (so may that of a StatefulSet, whose pods carry it in a label). A longer one
is cut, and a hash of the whole keeps it apart from others that begin alike.
*/}}
{{- define "emqtimerd.name" -}}
{{- $chart := default .Chart.Name .Values.nameOverride | lower -}}
{{- $name := .Release.Name -}}
{{- if .Values.fullnameOverride -}}
{{- $name = .Values.fullnameOverride -}}
{{- else if not (contains $chart .Release.Name) -}}
{{- $name = printf "%s-%s" .Release.Name $chart -}}
{{- end -}}
{{- /* A Service's name has no dots and begins with a letter; a release's may. */ -}}
{{- $name = replace "." "-" $name -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- $name = printf "%s-%s" $chart (trimSuffix (printf "-%s" $chart) $name) -}}
{{- end -}}
{{- if gt (len $name) 47 -}}
{{- $name = printf "%s-%s" (trunc 38 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{- define "emqtimerd.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "emqtimerd.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "emqtimerd.repository" -}}
{{- $repository := .Values.image.repository -}}
{{- $global := .Values.global | default dict -}}
{{- /* As for container engines: what stands before the first slash is a registry if it has a dot or a port. */ -}}
{{- if and $global.imageRegistry (not (regexMatch "^([^/]*[.:][^/]*|localhost)/" $repository)) -}}
{{- printf "%s/%s" (trimSuffix "/" $global.imageRegistry) $repository -}}
{{- else -}}
{{- $repository -}}
{{- end -}}
{{- end }}

{{- define "emqtimerd.image" -}}
{{- $repository := include "emqtimerd.repository" . -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end }}

{{/* The chart's own pull secrets and a parent's, whose charts disagree on whether a name stands in a table. */}}
{{- define "emqtimerd.pullSecrets" -}}
{{- $secrets := .Values.image.pullSecrets | default list -}}
{{- range (.Values.global | default dict).imagePullSecrets -}}
{{- $secrets = append $secrets (kindIs "string" . | ternary (dict "name" .) .) -}}
{{- end -}}
{{- toYaml (uniq $secrets) -}}
{{- end }}

{{/* What tells this release's objects from all others. Never changes: selectors are immutable. */}}
{{- define "emqtimerd.ownLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* The daemon's pods alone: those of `once` and of the test are neither scraped nor counted. */}}
{{- define "emqtimerd.daemonLabels" -}}
{{ include "emqtimerd.ownLabels" . }}
app.kubernetes.io/component: daemon
{{- end }}

{{/* The labels of an object that is not a pod. */}}
{{- define "emqtimerd.labels" -}}
{{ include "emqtimerd.ownLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
