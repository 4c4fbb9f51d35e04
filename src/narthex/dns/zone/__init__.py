"""The records of a cluster's zones, and how they change with its objects. Pure."""
