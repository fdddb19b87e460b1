{{/*
A value as TOML. Helm's own toToml writes every number of a values file with a decimal point, and
the daemon takes `limit = 100.0` for what it is: no whole number. JSON's texts, numbers and lists of
these are TOML as they stand; only tables differ.
*/}}
{{- define "emqtimerd.tomlValue" -}}
{{- if kindIs "map" . -}}
{{- $pairs := list -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $pairs = append $pairs (printf "%s = %s" (include "emqtimerd.tomlKey" $key) (include "emqtimerd.tomlValue" $value)) -}}
{{- end -}}
{{- end -}}
{{- printf "{ %s }" (join ", " $pairs) -}}
{{- else if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . -}}
{{- $items = append $items (include "emqtimerd.tomlValue" .) -}}
{{- end -}}
{{- printf "[%s]" (join ", " $items) -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end }}

{{- define "emqtimerd.tomlKey" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end }}

{{/* The daemon's configuration file. In TOML, what stands in no table comes before the tables. */}}
{{- define "emqtimerd.config" -}}
{{- range $key, $value := .Values.config }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $key }} = {{ include "emqtimerd.tomlValue" $value }}
{{- end }}
{{- end }}
{{- range $table, $values := .Values.config }}
{{- if kindIs "map" $values }}

[{{ $table }}]
{{- range $key, $value := $values }}
{{- if not (kindIs "invalid" $value) }}
{{ include "emqtimerd.tomlKey" $key }} = {{ include "emqtimerd.tomlValue" $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The grace of the configuration in seconds, rounded up. */}}
{{- define "emqtimerd.graceSeconds" -}}
{{- $grace := default "10s" .Values.config.shutdown_grace -}}
{{- $number := regexFind "^[0-9.]+" $grace | float64 -}}
{{- $unit := regexFind "[a-z]+$" $grace -}}
{{- $seconds := get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit -}}
{{- mulf $number $seconds | ceil | int -}}
{{- end }}

{{/*
How long a pod may take to end. Beyond the grace for sweeps the daemon needs a second for answers
to scrapes and a moment for its connections; being killed in that moment would look like a failure.
*/}}
{{- define "emqtimerd.terminationSeconds" -}}
{{- $grace := include "emqtimerd.graceSeconds" . | int -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- add $grace 10 -}}
{{- else if le (int .Values.terminationGracePeriodSeconds) $grace -}}
{{- fail (printf "terminationGracePeriodSeconds (%d) must be more than config.shutdown_grace (%s): leave it out, and it follows" (int .Values.terminationGracePeriodSeconds) .Values.config.shutdown_grace) -}}
{{- else -}}
{{- int .Values.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end }}

{{/* The ports in the node's URL, as a list in JSON. */}}
{{- define "emqtimerd.urlPorts" -}}
{{- $ports := list -}}
{{- $url := .Values.config.node.url -}}
{{- if not (hasPrefix "unix:" $url) -}}
{{- $default := ternary 26379 6379 (contains "+sentinel:" $url) -}}
{{- $places := regexReplaceAll "^[^:]+://([^/]*@)?" $url "" -}}
{{- range splitList "," (regexReplaceAll "/.*$" $places "") -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default (toString $default) | int) -}}
{{- end -}}
{{- end -}}
{{- toJson (uniq $ports) -}}
{{- end }}

{{/* What no schema can tell: settings that are right by themselves and wrong together. */}}
{{- define "emqtimerd.check" -}}
{{- $config := .Values.config -}}
{{- if not $config.node.url -}}
{{- fail "config.node.url is not set: the address of the EMQ node, such as redis://valkey:6379/0" -}}
{{- end -}}
{{- $discovers := dig "discovery" "enabled" false $config -}}
{{- if not (or $config.queues $discovers) -}}
{{- fail "nothing to sweep: list queues in config.queues, or set config.discovery.enabled" -}}
{{- end -}}
{{- if and .Values.tls.existingSecret (not (regexMatch "^(rediss|valkeys)[+:]" $config.node.url)) -}}
{{- fail (printf "tls.existingSecret is set, but config.node.url does not ask for TLS: it must begin with rediss:// or valkeys://, not %s://" (regexFind "^[^:]+" $config.node.url)) -}}
{{- end -}}
{{- if and .Values.auth.sentinel.existingSecret (not (contains "+sentinel:" $config.node.url)) -}}
{{- fail "auth.sentinel.existingSecret is set, but config.node.url names no sentinels" -}}
{{- end -}}
{{- if and .Values.auth.existingSecret (dig "node" "password_file" "" $config) -}}
{{- fail "both auth.existingSecret and config.node.password_file are set: keep one of the two" -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled -}}
{{- fail "both podMonitor and serviceMonitor are enabled: every sum over the metrics would be doubled; keep one of the two" -}}
{{- end -}}
{{- if and .Values.sharding.enabled (lt (int .Values.replicas) 1) -}}
{{- fail "sharding.enabled needs at least one replica: their number is the number of parts" -}}
{{- end -}}
{{- if and .Values.once.enabled (not (or .Values.once.queues $config.queues)) -}}
{{- fail "once.enabled needs queues by name: list them in once.queues or config.queues" -}}
{{- end -}}
{{- end }}
