"""The engine's states in files: a rank's pieces by canonical names, their writer, and a reader that runs no code."""
