"""Spikes of the loss: found, written down, and with --on_loss_spike rewind undone."""
