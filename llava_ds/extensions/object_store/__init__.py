"""Read data from object stores and web servers, with URLs in place of paths."""
