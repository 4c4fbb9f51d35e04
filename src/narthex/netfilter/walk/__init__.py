"""The path of a packet through rules, with exact probabilities."""
