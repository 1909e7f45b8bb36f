"""A regular comparison of the ranks' copies of the weights."""
