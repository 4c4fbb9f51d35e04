"""Dumps: the output of a node's rule tools, in any number of texts, as one rule set."""
