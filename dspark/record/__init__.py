"""What the target said, on disk: taps at every token, the last hidden state where it supervises."""
