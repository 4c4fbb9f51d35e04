"""Admission of Services and the ServiceCIDR controller. Read `admission.py` first."""
