"""The configuration file: KubeProxyConfiguration and NarthexConfiguration."""
