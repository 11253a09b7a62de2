"""Replacements of stock modules: row-invariant, packed, quantised or fused."""
