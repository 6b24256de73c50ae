"""Conversations and plain text into ids and loss masks, and the target's own responses."""
