"""Floor 3: strategies. One device, or many; nobody outside reaches into a wrapped model."""

STRATEGIES = {
    "single": "penjing.parallel.single:Single",
    "ddp": "penjing.parallel.ddp:DataParallel",
}
