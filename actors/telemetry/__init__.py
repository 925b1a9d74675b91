"""Telemetry: what writes the run folder, what Prometheus sees, and how much memory there was."""
