"""Out of memory: how many slots are in use, and computing in parts.

Half as many slots are in use after a step ran out of memory, and more again after passes without error.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")

FIRST_WAIT = 64  # successful passes before the number of slots is doubled
MAX_WAIT = 8192


class Capacity:
    """slots: in use now, of `max_slots`.

    Memory may become free again, or not. Each failure doubles the number of passes before the next try. So if memory
    stays short, tries become rare. A failed try only costs prefilling some prompts again.
    """

    def __init__(self, max_slots: int) -> None:
        self.slots = self.max_slots = max_slots
        self._passes_to_wait, self._passes_ok = FIRST_WAIT // 2, 0

    def on_out_of_memory(self, active: int) -> None:
        """A pass with `active` slots ran out of memory: use half as many."""
        self.slots, self._passes_ok = active // 2, 0
        self._passes_to_wait = min(2 * self._passes_to_wait, MAX_WAIT)

    def on_success(self) -> None:
        self._passes_ok += 1
        if self.slots < self.max_slots and self._passes_ok >= self._passes_to_wait:
            self.slots, self._passes_ok = min(2 * self.slots, self.max_slots), 0


def in_parts(
    rows: int, compute: Callable[[slice], Result], can_recover: Callable[[Exception], bool]
) -> Iterator[tuple[slice, Result | Exception]]:
    """`compute` for these rows at once; where memory runs out, for each half alone, and so on. A single row for which
    there is not enough memory has its error as the result."""
    parts = [slice(0, rows)]
    while parts:
        part = parts.pop()
        try:
            result: Result | Exception = compute(part)
        except Exception as error:
            if not can_recover(error):
                raise
            result = error.with_traceback(None)  # its frames hold tensors
        middle = (part.start + part.stop) // 2
        if isinstance(result, Exception) and middle > part.start:
            parts += [slice(middle, part.stop), slice(part.start, middle)]
        else:
            yield part, result
