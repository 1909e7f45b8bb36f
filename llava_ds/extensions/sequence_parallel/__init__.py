"""Ranks that share the tokens of every micro-batch, and compute attention for some heads each (DeepSpeed-Ulysses)."""
