"""One injection across many nodes: choose, send, remember, take back."""
