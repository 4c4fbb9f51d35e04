"""The EndpointSlice controllers: `controller.py` first."""
