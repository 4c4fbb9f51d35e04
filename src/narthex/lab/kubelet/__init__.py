"""What a kubelet decides of a pod, as data: its containers' environment and files, and its status."""
