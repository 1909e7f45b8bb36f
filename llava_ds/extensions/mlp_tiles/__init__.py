"""Run the language model's MLPs on a few tokens at a time to bound their memory for long samples."""
