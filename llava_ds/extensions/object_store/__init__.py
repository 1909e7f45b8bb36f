"""Data in object stores and on web servers, by URLs instead of paths."""
