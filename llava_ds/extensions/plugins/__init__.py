"""Check plugins before training, and provide base classes to build plugins from."""
