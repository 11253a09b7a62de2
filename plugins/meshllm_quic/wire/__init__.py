"""Datagrams as bytes."""
