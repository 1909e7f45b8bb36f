"""Data in object stores and on web servers, by URLs in the place of paths."""
