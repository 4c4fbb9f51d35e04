"""What the API server and the ServiceCIDR controller do for Services: `admission.py` first."""
