"""Modules that take the place of stock ones: row-invariant, packed or quantised."""
