"""The big frozen model: its configuration, weights, tokenizer and computation."""
