"""What the overlay asks of the machine: links, entries, rules, notices, files."""
