"""The processes of `narthex dns` and of node-local DNS."""
