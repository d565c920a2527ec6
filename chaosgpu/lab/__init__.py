"""The rehearsal cluster on one machine: a training job, its storage and network, and a real Prometheus that sees it."""
