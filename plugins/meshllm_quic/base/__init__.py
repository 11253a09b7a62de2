"""TLS identity and congestion control."""
