"""What every operation checks of its tensors, once, where it is called."""

from torch import Tensor, dtype

from dspark.kernels import MAX_TOKENS


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: dtype, num_strided: int = 0) -> None:
    """Raises: ValueError for another shape or dtype (none given: any), strides but in the first few."""
    is_right = tuple(tensor.shape) == shape and (not dtypes or tensor.dtype in dtypes)
    if not is_right or (tensor.numel() and not tensor[(0,) * num_strided].is_contiguous()):
        where = f" behind dimension {num_strided}" if num_strided else ""
        raise ValueError(
            f"{name}: expected {list(shape)} {' or '.join(map(str, dtypes))}, contiguous{where}, "
            f"found {list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
        )


def expect_window(name: str, num_tokens: int) -> None:
    """Raises: ValueError for a window of no token or of more than a verify step takes."""
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"{name}: expected 1 to {MAX_TOKENS} tokens, found {num_tokens}")
