"""Model families and the differences between them."""
