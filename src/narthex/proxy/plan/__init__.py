"""The plan: decisions for every Service port, computed from the objects of the cluster. Pure."""
