"""Opening an exported model, and answers from it."""
