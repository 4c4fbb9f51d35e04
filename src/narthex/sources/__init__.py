"""Where objects come from: directories of manifests. Effects, inwards."""
