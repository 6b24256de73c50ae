"""Fitting a draft to a record: batches, objective, optimizer, step, checkpoint, log."""
