"""Opening an exported model, answering and scoring."""
