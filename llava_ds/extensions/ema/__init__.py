"""A moving average of the weights that train, kept beside the optimizer's states and exported as a second model."""
