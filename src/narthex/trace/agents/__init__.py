"""What agents may ask (`narthex mcp`): requests, short answers, and references to the evidence."""
