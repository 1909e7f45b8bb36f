"""Embeddings of images and texts for retrieval: the language model's last hidden state."""
