"""The nouns of Service networking. Pure values; imports nothing else of ours."""
