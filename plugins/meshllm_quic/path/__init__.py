"""Path selection: NAT discovery, candidate addresses, probes, liveness and path MTU."""

__all__ = ["observation", "path_control", "paths", "rate_limit"]
