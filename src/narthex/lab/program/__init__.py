"""A cluster on one machine: brought up, looked at, asked, taken away."""
