"""What Prometheus, and whatever speaks its HTTP API, says about the system under fault."""
