"""The part of a tensor that lies in this process, where a strategy gives each rank a part."""

from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over ranks (a DTensor), sharing its memory; others as they are."""
    to_local = getattr(tensor, "to_local", None)  # importing DTensor takes a second, which single runs need not wait
    return tensor if to_local is None else to_local()
