"""Floor 3: trackers, which receive a run's metrics. A tracker that fails warns once and never stops training."""

TRACKERS = {
    "wandb": "penjing.track.wandb:Wandb",
}
