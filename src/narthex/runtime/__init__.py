"""What all long-running programs share: configuration, logging, HTTP, health, and signals."""
