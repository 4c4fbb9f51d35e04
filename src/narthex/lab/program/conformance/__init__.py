"""`narthex lab conformance`: Kubernetes' own end-to-end suite in a lab."""
