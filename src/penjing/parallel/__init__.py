"""Floor 3: strategies for one device or several. Only a strategy reaches into the model that it wrapped."""

STRATEGIES = {
    "single": "penjing.parallel.single:Single",
    "ddp": "penjing.parallel.ddp:DataParallel",
    "fsdp2": "penjing.parallel.fsdp2:FullyShardedDataParallel",
    "hsdp": "penjing.parallel.fsdp2:HybridShardedDataParallel",
    "zero1": "penjing.parallel.deepspeed:Zero1",
    "zero2": "penjing.parallel.deepspeed:Zero2",
    "zero3": "penjing.parallel.deepspeed:Zero3",
}
RESHARDING = ("fsdp2", "hsdp", "zero2")  # those that `parallel.reshard` is for
