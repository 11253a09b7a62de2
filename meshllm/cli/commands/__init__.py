"""The commands without a package of their own."""
