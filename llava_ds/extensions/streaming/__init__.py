"""Train while the data are still being encoded."""
