"""What a scheme does, for OpenTelemetry (the extra `otel`) and Prometheus (the extra `prometheus`)."""
