"""Ingresses: which server answers a request (`routing.py`), and the status and Events of each (`controller.py`)."""
