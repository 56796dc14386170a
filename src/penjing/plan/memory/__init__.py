"""Memory of a training step without a GPU: a trace on the meta device, replayed through the allocator's rules.

`trace.py` records, `fake_device_mode.py` makes code take the target device's paths, `allocator.py` replays, `report.py`
summarises. `penjing/train/memory_trace/`, one floor up, builds the run that is traced.
"""

from penjing.plan.memory.device_target import Target, is_tight, safe_bytes
from penjing.plan.memory.fake_device_mode import FakeDeviceMode
from penjing.plan.memory.report import MemoryPlan, plan_from, replay
from penjing.plan.memory.trace import Trace, Tracer

__all__ = ["FakeDeviceMode", "MemoryPlan", "Target", "Trace", "Tracer", "is_tight", "plan_from", "replay", "safe_bytes"]
