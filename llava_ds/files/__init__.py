"""Safe reading and writing of files."""
