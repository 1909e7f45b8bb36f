"""A run from its plan to its end: the loop, its hooks, the objectives, and what watches over them."""
