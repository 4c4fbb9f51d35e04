"""Configuration files that are read for a test."""

from narthex.runtime.configuration.file import ProxyConfiguration, parse

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def good(body: str, *warnings: str) -> ProxyConfiguration:
    configuration, problems = parse((HEAD + body).encode(), "proxy.yaml")
    assert [problem.field for problem in problems] == list(warnings)
    return configuration
