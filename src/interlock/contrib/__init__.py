"""What connects interlock to other libraries. Each module needs an extra, and says so.

otel    metrics and traces for OpenTelemetry (`interlock[otel]`)
"""
