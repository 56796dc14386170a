"""Floor 3: optimizers, their parameter groups, and learning-rate schedules."""

OPTIMIZERS = {
    "adamw": "penjing.optim.adamw:AdamW",
    "muon": "penjing.optim.muon:Muon",
}
SCHEDULES = {
    "cosine": "penjing.optim.schedule:Cosine",
    "wsd": "penjing.optim.schedule:WarmupStableDecay",
    "constant": "penjing.optim.schedule:Constant",
}
