"""Memory and speed of a run before it starts, and the choice of a configuration that fits."""
