"""The only package that depends on DeepSpeed's internals."""
