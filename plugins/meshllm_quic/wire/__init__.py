"""Wire formats: datagrams, stream records, cookies and routes."""
