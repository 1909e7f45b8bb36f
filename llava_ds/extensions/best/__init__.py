"""Keep the checkpoint with the best evaluation, export its model, and stop early if evaluations stop improving."""
