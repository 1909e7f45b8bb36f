"""Tensor parallelism: DeepSpeed's AutoTP divides the matrices of the language model's layers over ranks."""
