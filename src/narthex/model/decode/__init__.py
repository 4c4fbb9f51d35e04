"""Kubernetes YAML and JSON to objects."""
