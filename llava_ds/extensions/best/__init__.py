"""The best evaluation: keep its checkpoint, export its model, and stop early when no better one comes."""
