"""The list of runs, curves of several, and what one left behind: all of it from the runs' folders."""

import json
import os
import time

import numpy as np

from penjing.base.lock import locked
from penjing.report.live import LiveRun
from penjing.report.metrics import thinned
from penjing.track.run_record import RunRecord
from penjing.ui.curves import smoothed


def curves(client, *runs, **query):
    charts = client.get("/api/curves", params={"run": runs, **query}).json()["charts"]
    return {(chart["metric"], line["run"], line["metric"]): line for chart in charts for line in chart["series"]}


def rows(client):
    return {row["id"]: row for row in client.get("/api/runs").json()["runs"]}


def test_every_run_below_the_folder_is_listed_with_its_state(client, folder, write_run, tmp_path_factory):
    write_run(folder / "runs" / "a")
    write_run(folder / "runs" / "quick" / "sft", done=False)
    stopped = write_run(folder / "runs" / "b", done=False)
    (stopped / "ended.json").write_text(
        json.dumps({"ended": "stopped", "why": "stopped by SIGTERM", "steps_done": 200})
    )
    active = write_run(folder / "runs" / "c", done=False)
    (folder / "runs" / "out").symlink_to(write_run(tmp_path_factory.mktemp("other") / "run"))
    write_run(folder / ".hidden")
    with locked(active):
        found = rows(client)
        states = {name: row["state"] for name, row in found.items()}
        assert states == {
            "runs/a": "finished",
            "runs/b": "stopped",
            "runs/c": "running",
            "runs/quick/sft": "killed",
        }
    assert rows(client)["runs/c"]["state"] == "killed"
    shown = {name: found["runs/a"][name] for name in ("step", "steps", "parameters")}
    assert shown == {"step": 200, "steps": 200, "parameters": 1_067_136}
    assert (found["runs/a"]["figure"]["title"], found["runs/a"]["figure"]["value"]) == ("Loss", 3.01)  # held out


def test_each_kind_of_run_is_listed_with_its_own_figure(client, folder, write_run):
    figures = {"preference_loss": 0.6, "val_reward": 0.25, "kl": 0.5}
    for name, value in figures.items():
        run = write_run(folder / name)
        line = {"step": 10, name: value, "policy_loss": 0.0, "grad_norm": 1.0}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = {name: row["figure"] for name, row in rows(client).items()}
    assert {name: figure["value"] for name, figure in found.items()} == figures
    assert [name for name, figure in found.items() if figure["held_out"]] == ["val_reward"]


def test_a_chart_of_several_figures_has_a_colour_for_each_and_scores_of_tasks_are_percentages(
    client, folder, write_run
):
    run = write_run(folder / "a")
    names = ("chosen_reward", "val_chosen_reward", "rejected_reward", "val_rejected_reward")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 10, "val_acc_blimp": 0.5, **dict.fromkeys(names, 1.0)}))
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n")
    drawn = curves(client, "a")
    places = {metric: line["place"] for (chart, _, metric), line in drawn.items() if chart == "chosen_reward"}
    assert places == dict(zip(names, (0, 0, 1, 1), strict=True))
    charts = {chart["metric"]: chart for chart in client.get("/api/curves", params={"run": "a"}).json()["charts"]}
    assert charts["acc_blimp"]["percent"] and not curves(client, "a", small=True)


def test_what_differs_between_runs(client, folder, write_run):
    for name, more in (("a", "seq_len = 64"), ("b", ""), ("c", "seq_len = 128")):
        with open(write_run(folder / name) / "run.toml", "a") as file:
            file.write(f"[data]\n{more}\n")
    found = client.get("/api/differences", params={"run": ["a", "c", "b"]}).json()
    assert found == {"data.seq_len": ["64", "128", ""]}


def test_the_step_is_that_of_the_newest_checkpoint_where_the_metrics_lag(client, folder, write_run):
    run = write_run(folder / "a", 1, done=False)
    (run / "checkpoints" / "step-00000019").mkdir(parents=True)
    (run / "ended.json").write_text(json.dumps({"ended": "stopped", "steps_done": 19}))
    assert rows(client)["a"].items() >= {"step": 19, "state": "stopped"}.items()
    assert LiveRun(run).step == RunRecord(run).last_step == 19
    (run / "ended.json").write_text(json.dumps({"ended": "failed", "steps_done": 23}))  # it saved nothing at its end
    assert rows(client)["a"].items() >= {"step": 23, "state": "failed"}.items()
    assert LiveRun(run).step == RunRecord(run).last_step == 23
    with locked(run):  # it goes on from the checkpoint
        assert LiveRun(run).step == 19


def test_why_a_run_ended_is_forgotten_once_it_has_gone_on(client, folder, write_run):
    run = write_run(folder / "a", 2, done=False)
    for steps_done, why in ((20, "NaN"), (10, "")):
        (run / "ended.json").write_text(json.dumps({"ended": "failed", "why": "NaN", "steps_done": steps_done}))
        shown = client.get("/api/run", params={"run": "a"}).json()
        assert (shown["why"], shown["state"]) == (why, "failed" if why else "killed")
        assert any(term[0] == "time" for term in shown["terms"]) != bool(why)  # those of the metrics


def test_a_run_that_has_just_begun_is_the_first(client, folder, write_run):
    (folder / "new" / "checkpoints").mkdir(parents=True)
    for file in write_run(folder / "old").iterdir():
        os.utime(file, (1e9, 1e9))
    assert list(rows(client)) == ["new", "old"]


def test_a_name_that_is_not_utf8_hides_nothing(client, folder, write_run):
    write_run(folder / "good")
    (folder / "text.txt").write_text("text\n")
    other = os.fsencode(folder) + "/中文".encode("gbk")
    write_run(folder / "other").rename(os.fsdecode(other))
    os.link(folder / "text.txt", other + b".txt")
    assert rows(client).keys() == {"good"}
    assert [file["path"] for file in client.get("/api/data/files").json()["files"]] == ["text.txt"]


def test_damaged_files_hide_no_run(client, folder, write_run):
    write_run(folder / "good")
    bad = write_run(folder / "bad")
    for file in bad.iterdir():
        file.write_bytes(b'{"step": \xff')
    assert {name: row["state"] for name, row in rows(client).items()} == {"good": "finished", "bad": "killed"}
    assert client.get("/api/run", params={"run": "bad"}).json()["incidents"] == []
    assert curves(client, "bad", "good", x="time").keys() == curves(client, "good").keys()


def test_an_incident_that_cannot_be_sent_hides_no_run(client, folder, write_run):
    run = write_run(folder / "a")
    (run / "incidents.jsonl").write_text('{"step": 30, "kind": "\\ud800", "more": [NaN]}\n')
    incidents = client.get("/api/run", params={"run": "a"}).json()["incidents"]
    assert incidents == [{"step": 30, "kind": "?", "more": ["NaN"]}]


def test_curves_by_step_tokens_and_time_at_one_scale(client, folder, write_run):
    write_run(folder / "a", level=3)
    write_run(folder / "b", level=2)
    drawn = curves(client, "a", "b")
    assert drawn["loss", "a", "loss"]["x"][:2] == [10, 20] and drawn["loss", "b", "loss"]["y"][:2] == [2.1, 2.05]
    assert drawn["loss", "a", "val_loss"]["x"] == [100, 200]
    assert curves(client, "a", x="tokens")["loss", "a", "loss"]["x"][:2] == [640, 1280]
    assert curves(client, "a", x="time")["loss", "a", "val_loss"]["x"] == [25, 50], "a line without seconds"
    assert curves(client, "a", low=95, high=115)["loss", "a", "loss"]["x"] == [100, 110]
    assert {key[0] for key in curves(client, "a", small=True)} == {"learning_rate", "grad_norm", "tokens_per_second"}


def test_a_growing_file_is_read_on_from_where_it_was(client, folder, write_run):
    run = write_run(folder / "a", 2, done=False)
    assert curves(client, "a")["loss", "a", "loss"]["x"] == [10, 20]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "loss": 1.5, "tokens": 1920}\n{"step": 40, "lo')
    assert curves(client, "a")["loss", "a", "loss"]["y"][-1] == 1.5
    (run / "metrics.jsonl").write_text('{"step": 10, "loss": 9.5}\n')  # rolled back
    assert curves(client, "a")["loss", "a", "loss"]["y"] == [9.5]


def test_the_stream_tells_of_changes(client, folder, write_run, monkeypatch):
    import asyncio

    from penjing.ui import runs as tab
    from penjing.ui.live_runs import LiveRuns
    from penjing.ui.processes import Trainings
    from penjing.ui.site import Site

    run = write_run(folder / "a", 2, done=False)
    monkeypatch.setattr(tab, "TICK_SECONDS", 0.01)
    closing = []
    site = Site(folder, lambda: bool(closing))

    async def listen():
        live = LiveRuns(site, Trainings(site))
        stream = tab._events(live, site)
        first = json.loads((await anext(stream))[6:])
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 30, "loss": 1.5, "tokens": 1920}\n')
        second = json.loads((await anext(stream))[6:])
        write_run(folder / "new")
        assert b'"new"' in await anext(tab._events(live, site)), "another window, opened at a run that has just begun"
        closing.append(True)
        return first, second, [event async for event in stream]

    first, second, rest = asyncio.run(asyncio.wait_for(listen(), 10))
    assert [event["runs"][0]["step"] for event in (first, second)] == [20, 30]
    assert first["runs"][0]["version"] != second["runs"][0]["version"] and rest == [b"data: [DONE]\n\n"]


def test_one_run_with_all_that_it_left_behind(client, folder, write_run):
    write_run(folder / "runs" / "a")
    shown = client.get("/api/run", params={"run": "runs/a"}).json()
    assert shown["settings"]["seed"] == "7" and shown["command"] == "penjing train runs/a/run.toml"
    assert shown["samples"] == [{"prompt": "Tom", "language": "en", "texts": [[100, " <b>sat</b>"]]}]
    assert shown["incidents"] == [{"step": 30, "kind": "not finite", "loss": "NaN"}]
    assert ["time", "seconds", 40.0, 50.0, -0.2] in shown["terms"]
    assert client.get("/api/run", params={"run": "runs"}).json()["error"]["code"] == "no_run"
    assert client.get("/api/run", params={"run": "../x"}).json()["error"]["code"] == "outside_folder"
    assert client.get("/api/curves", params={"run": "/etc"}).status_code == 403


def test_thinning_keeps_the_ends_and_every_spike():
    rng = np.random.default_rng(1)
    for size in (5, 999, 1000, 1001, 10_007):
        y = rng.normal(size=size)
        y[size // 3], y[size // 2] = 50, -50
        kept = thinned(y, 1000)
        assert {0, size - 1, size // 3, size // 2} <= set(kept.tolist()) and len(kept) <= min(size, 1006)
        assert (np.diff(kept) > 0).all()


def test_smoothing_starts_without_a_bias():
    assert np.allclose(smoothed(np.full(50, 2.5), 0.9), 2.5)
    two = smoothed(np.array([1.0, 3.0]), 0.5)
    assert np.allclose(two, [1.0, (0.5 * 0.5 * 1 + 0.5 * 3) / 0.75])


def test_long_runs_are_thinned_quickly(client, folder, write_run):
    """20 runs are promised in 300 ms, on a machine with nothing else to do; here a fifth may take as much CPU time."""
    names = [f"r{number}" for number in range(4)]
    for number, name in enumerate(names):
        write_run(folder / name, 10_000, level=number)
    curves(client, *names)
    began = time.process_time()
    drawn = curves(client, *names, smooth=0.9)
    seconds = time.process_time() - began
    assert seconds < 0.3, seconds
    assert all(len(line["x"]) <= 1006 for line in drawn.values()) and len(drawn) == 8
