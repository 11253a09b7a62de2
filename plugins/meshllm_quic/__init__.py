"""Links over QUIC, straight through NATs or by a relay; knows nothing about meshes."""
