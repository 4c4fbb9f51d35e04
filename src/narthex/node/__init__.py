"""`narthex node`: the parts of a node in one process."""
