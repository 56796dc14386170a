"""What each tracker has of a run, read by its own library: `python read_trackers.py RUN` prints JSON."""

import json
import os
import struct
import sys
from pathlib import Path

BLOCK_BYTES = 32768  # of LevelDB's log format, in which a .wandb file holds its records


def wandb_records(path):
    """The records of a .wandb file: blocks of (checksum, length, first/middle/last/whole, data), after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):  # cut by a kill
            return
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""


def read_wandb(folder, _):
    """The newest part has the whole run; `wandb sync` of it replaces what the server has."""
    ids, others = set(), set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):  # by the time of their start
        rows, config = [], {}
        for record in wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                rows.append((record.history.step.num, {name: json.loads(value) for name, value in items.items()}))
            elif kind == "summary":
                others |= {item.key or item.nested_key[0] for item in record.summary.update}
            elif kind == "files":
                others |= {item.path for item in record.files.files}
    return {"ids": ids, "rows": rows, "config": config, "others": others}


def read_swanlab(folder, _):
    """Of a step that several parts have, its server keeps the first value."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    ids, seen, rows, others = set(), set(), [], set()
    for path in sorted(folder.glob("swanlab/run-*/*.swanlab")):
        if not path.stat().st_size:  # killed before its buffer was written
            continue
        reader, in_part = DataStoreReader(), set()
        reader.open(path)
        for written in reader:
            record = Record.FromString(written)
            if record.HasField("start"):
                ids.add(record.start.id)
            elif record.HasField("scalar"):
                key = record.scalar.key, record.scalar.step
                assert key not in in_part
                in_part.add(key)
                if key not in seen:
                    rows.append((record.scalar.step, {record.scalar.key: record.scalar.value.number}))
            elif record.HasField("media"):
                others.add(record.media.key)
            elif record.HasField("save"):
                others.add(record.save.name)
        seen |= in_part
    return {"ids": ids, "rows": rows, "others": others}


def read_tensorboard(folder, _):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    rows = [(event.step, {name: event.value}) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    others = {name.removesuffix("/text_summary") for name in events.Tags()["tensors"]}
    return {"ids": [], "rows": rows, "others": others}


def read_trackio(folder, project):
    from trackio.sqlite_storage import SQLiteStorage

    records = SQLiteStorage.get_run_records(project)
    rows, others, config = [], set(), {}
    for record in records:
        config |= SQLiteStorage.get_run_config(project, record["name"])
        for row in SQLiteStorage.get_logs(project, record["name"]):
            others |= {name for name, value in row.items() if isinstance(value, dict)}
            rows.append((row["step"], {name: value for name, value in row.items() if isinstance(value, float | int)}))
    return {"ids": [record["id"] for record in records], "rows": rows, "config": config, "others": others}


def read_mlflow(folder, project):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"file:{folder / 'mlflow'}")
    runs = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    rows, others = [], set()
    for run in runs:
        for name in run.data.metrics:
            rows += [(one.step, {name: one.value}) for one in client.get_metric_history(run.info.run_id, name)]
        others |= {file.path for file in client.list_artifacts(run.info.run_id)} | {run.info.status}
    return {"ids": [run.info.run_id for run in runs], "rows": rows, "config": runs[0].data.params, "others": others}


READERS = {
    "wandb": read_wandb,
    "swanlab": read_swanlab,
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
}


def read(folder, names=tuple(READERS), project="penjing"):
    os.environ |= {"TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_ALLOW_FILE_STORE": "true"}
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true"}
    found = {}
    for name in names:
        has = found[name] = READERS[name](folder, project)
        curves = {}
        for step, metrics in has.pop("rows"):
            for metric, value in metrics.items():
                if not metric.startswith("_") and isinstance(value, float | int):
                    curves.setdefault(metric, []).append((step, value))
        has |= {"curves": curves, "ids": sorted(has["ids"]), "others": sorted(has["others"])}
    return found


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]).resolve(), sys.argv[2:] or tuple(READERS))))
