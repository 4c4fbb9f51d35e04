"""Causes of failing paths, found in the path, in the views of nodes, and in the cluster's objects. Pure."""
