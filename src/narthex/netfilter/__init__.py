"""One language for all who read or write netfilter rules: nodes, printers, parsers, and a walk through them."""
