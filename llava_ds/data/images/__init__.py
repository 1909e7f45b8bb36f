"""Images and videos on their way to tiles."""
