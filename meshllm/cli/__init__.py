"""The command line: parses, calls one function below, shows."""
