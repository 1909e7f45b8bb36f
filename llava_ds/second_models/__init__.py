"""Second models that are loaded besides the trained model and not trained."""
