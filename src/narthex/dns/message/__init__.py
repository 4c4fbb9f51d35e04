"""DNS messages: names, questions, and responses as bytes. Pure."""
