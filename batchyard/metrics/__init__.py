"""What is counted and published for Prometheus."""
