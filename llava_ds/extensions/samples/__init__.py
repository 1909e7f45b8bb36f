"""Sample answers: a few questions are answered while the run trains, and shown with their images."""
