"""Optional features, one folder each. The rest of the package never imports them by name."""
