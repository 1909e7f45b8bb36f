"""A regular comparison of the weights that ranks hold copies of."""
