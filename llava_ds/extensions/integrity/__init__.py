"""Checks that weights, gradients, optimizer states, batches and speed of every rank are as they should be."""
