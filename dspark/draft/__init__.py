"""The small model: it drafts a block of tokens from the target's states at the positions before an anchor."""
