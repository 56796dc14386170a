"""How many slots are in use: half as many after a pass ran out of memory, more again after passes without error."""

from __future__ import annotations

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
        """A pass had enough memory."""
        self._passes_ok += 1
        if self.slots < self.max_slots and self._passes_ok >= self._passes_to_wait:
            self.slots, self._passes_ok = min(2 * self.slots, self.max_slots), 0
