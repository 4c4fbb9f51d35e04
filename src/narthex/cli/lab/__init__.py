"""`narthex lab` and its subcommands."""
