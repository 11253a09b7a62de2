"""The ring of a plan: forming it, and failover of a request when it breaks."""
