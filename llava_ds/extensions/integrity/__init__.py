"""Check every rank's weights, gradients, optimizer states, batches and speed for silent errors."""
