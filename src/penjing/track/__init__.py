"""Floor 3: where figures go while a run goes on. A tracker that fails warns once and never stops training."""

TRACKERS = {
    "wandb": "penjing.track.wandb:Wandb",
}
