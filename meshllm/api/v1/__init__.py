"""`/v1/*`: the public API; a file for each dialect, over one internal request."""
