"""The Deployment controller: `controller.py` first, then its arithmetic and what it writes into objects."""
