"""The language model's MLPs, run on a few tokens at a time, so that their memory does not grow with a sample."""
