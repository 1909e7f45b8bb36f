"""Second models: loaded in addition to the trained model, and not trained."""
