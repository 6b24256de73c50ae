"""Speculative decoding: what is drawn, what is kept, whole texts."""
