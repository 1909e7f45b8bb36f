"""Looking at a machine or a model before training on it."""
