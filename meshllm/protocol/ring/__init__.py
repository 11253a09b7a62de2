"""The ring of a plan: forming it, and failover of a request when it breaks."""

__all__ = ["failover", "forming", "hang", "interruption", "plan_change", "slowdown"]
