"""The best evaluation: its checkpoint is kept and may become the model, and a run may end without a better one."""
