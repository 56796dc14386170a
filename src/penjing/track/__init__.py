"""Floor 3: trackers, which receive a run's metrics. A tracker that fails warns once and never stops training."""

TRACKERS = {
    "wandb": "penjing.track.wandb:Wandb",
    "swanlab": "penjing.track.swanlab:SwanLab",
    "tensorboard": "penjing.track.tensorboard:TensorBoard",
    "trackio": "penjing.track.trackio:Trackio",
    "mlflow": "penjing.track.mlflow:MLflow",
}
