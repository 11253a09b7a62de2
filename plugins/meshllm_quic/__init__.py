"""Links over QUIC, straight through NATs or by a relay."""
