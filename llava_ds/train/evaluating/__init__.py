"""Evaluation during training: the eval loss, measures of extensions, and answers sampled from the current weights."""
