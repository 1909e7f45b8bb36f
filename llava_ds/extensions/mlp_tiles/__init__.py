"""The MLPs of the language model on some tokens at a time, so that their memory does not grow with a sample."""
