"""The node proxy: Services and EndpointSlices to kernel state."""
