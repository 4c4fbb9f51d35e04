"""`narthex trace` and the text that it prints."""
