"""The records of a cluster, and how they change with its objects. Pure."""
