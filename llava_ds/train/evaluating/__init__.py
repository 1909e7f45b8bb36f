"""Evaluation while training: the eval loss, what extensions measure, and answers drawn from the weights as they are."""
