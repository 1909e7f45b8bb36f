"""Classification of images and text, with a linear head on the language model's last hidden state."""
