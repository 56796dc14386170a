"""Benchmarks: speed and memory compared with other programs, and sweeps on this machine.

`BENCHMARKS` lists the comparisons of `penjing bench train --method` and `penjing bench decode`. A new one is a subclass
of `comparison.Benchmark` in its own file, and a line here. comparison.py runs the trials, record.py defines the record,
table.py renders it.
"""

BENCHMARKS = {
    "pretrain": "penjing.bench.pretrain:Pretrain",
    "dpo": "penjing.bench.alignment:Dpo",
    "grpo": "penjing.bench.alignment:Grpo",
    "decode": "penjing.bench.decode:Decode",
}
