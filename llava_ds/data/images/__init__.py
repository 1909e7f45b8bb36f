"""Decoding of images and videos to tiles."""
