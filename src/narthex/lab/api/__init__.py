"""The lab's Kubernetes API without a network: objects, their versions, and the response to each request.

Start with `api` (one request) and `registry` (writes). It follows kube-apiserver 1.34.
"""
