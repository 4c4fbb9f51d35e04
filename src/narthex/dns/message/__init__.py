"""DNS messages as bytes: names, queries, and responses (RFC 1035, 6891). Pure."""
