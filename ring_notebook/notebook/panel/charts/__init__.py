"""Charts of metrics, live and still."""
