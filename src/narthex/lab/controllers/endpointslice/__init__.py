"""The EndpointSlice controllers. Read `controller.py` first."""
