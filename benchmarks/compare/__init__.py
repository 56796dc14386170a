"""Speed and memory compared with other programs: `python benchmarks/train.py` and `python benchmarks/decode.py`.

`BENCHMARKS` lists the comparisons. A new one is a subclass of `comparison.Benchmark` in its own file, and a line here.
comparison.py runs the trials, figures.py computes their figures; table.py renders tables.
"""

BENCHMARKS = {
    "pretrain": "compare.pretrain:Pretrain",
    "dpo": "compare.alignment:Dpo",
    "grpo": "compare.alignment:Grpo",
    "decode": "compare.decode:Decode",
}
