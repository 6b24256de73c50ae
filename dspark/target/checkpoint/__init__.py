"""The files of a model folder: reading them."""
