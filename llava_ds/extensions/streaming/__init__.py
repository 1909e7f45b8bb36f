"""Training while the data are being encoded."""
