"""Questions about all packets of a node in operators' terms: a small grammar, and answers as sets of packets."""
