"""A moving average of the trained weights, stored with the optimizer's states and exported as a second model."""
