"""How many slots are in use: fewer after a pass ran out of memory, more again once passes have gone well."""

from __future__ import annotations

FIRST_WAIT = 64  # passes that go well before twice as many slots are tried
LONGEST_WAIT = 8192


class Capacity:
    """slots: in use now, of `most` that there are.

    Memory that was short may be free again, or may not. So each fault doubles the passes before the next try: where
    memory stays short, tries become rare, and a try that fails costs no more than some prompts read again.
    """

    def __init__(self, most: int) -> None:
        self.slots = self.most = most
        self._wait, self._good = FIRST_WAIT // 2, 0

    def ran_out(self, active: int) -> None:
        """A pass over so many slots ran out of memory: from now on half of them."""
        self.slots, self._good = active // 2, 0
        self._wait = min(2 * self._wait, LONGEST_WAIT)

    def went_well(self) -> None:
        """A pass had the memory that it needed."""
        self._good += 1
        if self.slots < self.most and self._good >= self._wait:
            self.slots, self._good = min(2 * self.slots, self.most), 0
