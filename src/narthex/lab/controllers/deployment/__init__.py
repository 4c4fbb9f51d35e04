"""The Deployment controller. Read `controller.py` first."""
