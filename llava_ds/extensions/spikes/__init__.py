"""Spikes of the loss: detected, recorded, and undone with --on_loss_spike rewind."""
