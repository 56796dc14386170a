"""Floor 3: engines. One device, or many; nobody outside reaches into a wrapped model."""

ENGINES = {
    "single": "penjing.parallel.single:Single",
    "ddp": "penjing.parallel.ddp:DataParallel",
}
