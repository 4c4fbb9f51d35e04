"""Names of links. Apart from the rest of mode ipvs, so that who only passes over them need not load that."""

IPVS_LINK = "kube-ipvs0"
"""kube-proxy's dummy link that has the Services' addresses in mode ipvs."""
