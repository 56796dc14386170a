"""Trackers that hang, raise or exit, and one that writes what it hears."""

import json
import sys
import time

from penjing.track.base import Tracker


class HangAtStart(Tracker):
    def start(self, folder, **settings):
        time.sleep(60)


class HangAtLog(Tracker):
    def log(self, step, metrics):
        time.sleep(60)


class RaiseAtLog(Tracker):
    def log(self, step, metrics):
        raise RuntimeError("500 from the server")


class RaiseAtSummary(Tracker):
    def summary(self, name, figures):
        sys.exit(3)


class Listener(Tracker):
    """Writes every call into `heard.jsonl` beside the run's folder."""

    def start(self, folder, **settings):
        self.file = open(folder.parent / "heard.jsonl", "a")
        self.hear("start", folder.name, settings["config"]["max_steps"])

    def hear(self, *what):
        print(json.dumps(what), file=self.file, flush=True)

    def sample(self, step, samples):
        self.hear("sample", step, [one["prompt"] for one in samples])

    def incident(self, incident):
        self.hear("incident", incident["step"], incident["kind"])

    def end(self):
        self.hear("end")
