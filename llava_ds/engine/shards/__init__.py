"""The engine's states in files: a rank's pieces by parameter name, their writer, and a reader that runs no code."""
