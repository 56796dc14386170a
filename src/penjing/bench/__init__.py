"""Speed and memory beside other programs, and tables of this machine's own.

`BENCHMARKS` names the comparisons, those of `penjing bench train --method` and `penjing bench decode`: a new one is a
subclass of `comparison.Benchmark` in a file of its own, and a line here. comparison.py runs the trials, record.py says
what is written, table.py renders it.
"""

BENCHMARKS = {
    "pretrain": "penjing.bench.pretrain:Pretrain",
    "dpo": "penjing.bench.alignment:Dpo",
    "grpo": "penjing.bench.alignment:Grpo",
    "decode": "penjing.bench.decode:Decode",
}
