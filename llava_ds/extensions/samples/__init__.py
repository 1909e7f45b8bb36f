"""Sample answers: a few questions that are answered while the run trains, and shown beside their images."""
