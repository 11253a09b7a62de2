"""Transport over QUIC: direct connections by NAT hole punching, else through a relay."""
