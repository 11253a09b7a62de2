"""Path selection: NAT discovery, candidate addresses, probes, liveness and path MTU."""
