"""Connections and links: dialling, listening, and the shared UDP socket."""
