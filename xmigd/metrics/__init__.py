"""What is counted, for Prometheus and for charts."""
