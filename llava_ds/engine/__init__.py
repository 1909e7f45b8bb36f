"""The only room that knows DeepSpeed's insides."""
