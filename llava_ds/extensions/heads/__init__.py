"""Heads on the language model's last hidden state: classes of images and texts, and embeddings for retrieval."""
