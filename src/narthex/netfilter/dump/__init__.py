"""Output of rule tools, in any number of texts, read as one rule set. Pure."""
