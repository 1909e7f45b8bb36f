"""The check of plugins before training, and parts that plugins are built from."""
