"""Fewer slots where memory is short, more once it is not, and no to and fro."""

from penjing.infer.capacity import FIRST_WAIT, MAX_WAIT, Capacity


def passes(capacity, count, room):
    """So many passes with every slot active, of which `room` have memory; how often it ran out."""
    faults = 0
    for _ in range(count):
        if capacity.slots > room:
            capacity.on_out_of_memory(capacity.slots)
            faults += 1
        else:
            capacity.on_success()
    return faults


def test_it_doubles_after_passes_that_went_well_until_all_are_in_use():
    capacity = Capacity(48)
    assert passes(capacity, 10_000, room=48) == 0 and capacity.slots == 48
    capacity.on_out_of_memory(40)
    assert capacity.slots == 20
    for slots in (20, 40):
        assert passes(capacity, FIRST_WAIT - 1, room=48) == 0 and capacity.slots == slots
        capacity.on_success()
    assert capacity.slots == 48 and passes(capacity, 10_000, room=48) == 0 and capacity.slots == 48


def test_where_memory_stays_short_it_is_tried_ever_more_rarely():
    capacity = Capacity(64)
    faults = [passes(capacity, 10_000, room=20) for _ in range(6)]
    assert capacity.slots in (16, 32) and faults[0] < 12 and max(faults[1:]) <= 1 + 10_000 // MAX_WAIT
    assert passes(capacity, 5 * MAX_WAIT, room=64) == 0 and capacity.slots == 64  # it is given back at last


def test_a_pass_over_fewer_than_are_in_use_tells_what_fits():
    capacity = Capacity(64)
    capacity.on_out_of_memory(3)
    assert capacity.slots == 1
