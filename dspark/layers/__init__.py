"""Small modules that both models are made of."""
