"""`narthex node`: the parts of a node side by side in one process."""
