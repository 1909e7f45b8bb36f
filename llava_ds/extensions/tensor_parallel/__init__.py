"""Ranks that share the matrices of the language model's layers, which DeepSpeed's AutoTP cuts."""
