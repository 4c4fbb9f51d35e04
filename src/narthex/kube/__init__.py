"""The Kubernetes API as a source: lists and watches that stay up to date whatever a server and a network do."""
