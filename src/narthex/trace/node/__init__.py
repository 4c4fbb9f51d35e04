"""What a node's tools printed, as a `NodeView`: single files and bundles."""
