"""Tensor parallelism: ranks share the matrices of the language model's layers, cut by DeepSpeed's AutoTP."""
