"""Detect and record spikes of the loss, and undo them with --on_loss_spike rewind."""
