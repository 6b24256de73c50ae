"""The files of a model folder: which tensors they must hold, reading and writing them."""
