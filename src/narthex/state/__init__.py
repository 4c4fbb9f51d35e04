"""State kept across turns: the Store and its Snapshots. Pure."""
