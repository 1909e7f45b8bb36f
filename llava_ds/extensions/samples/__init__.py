"""Answer a few questions during training, to show how the model's answers change."""
