"""The best evaluation: its checkpoint is kept and becomes the model, and a run may end for want of a better one."""
