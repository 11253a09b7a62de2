"""Links over QUIC."""
