"""Decoders from Kubernetes YAML and JSON to `model.objects`."""
