"""Classification of images with a text, by a head on the language model's last hidden state."""
