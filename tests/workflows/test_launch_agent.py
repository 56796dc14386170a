"""The launcher on another torch than 2.13, whose agent lacks what ours builds on: torch's own, and one line."""

import signal
from dataclasses import make_dataclass

from penjing.workflows import launch


def test_without_the_names_it_builds_on_it_is_the_agent_of_torch(monkeypatch, capsys):
    monkeypatch.setattr(launch.LocalElasticAgent, "__init__", lambda self, spec: None)  # which makes no private name
    monkeypatch.setattr(launch.LocalElasticAgent, "_monitor_workers", lambda self, group: ("theirs", group))
    before = signal.getsignal(signal.SIGTERM)
    agent = launch.Agent("spec")
    assert signal.getsignal(signal.SIGTERM) is before
    assert agent._monitor_workers("group") == ("theirs", "group")
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no _pcontext" in line


def test_settings_that_an_earlier_torch_does_not_know_are_left_out(monkeypatch):
    given = []
    fewer = make_dataclass("LaunchConfig", ["min_nodes", "max_nodes", "nproc_per_node", "max_restarts"])
    monkeypatch.setattr(launch.api, "LaunchConfig", fewer)
    monkeypatch.setattr(launch.api, "elastic_launch", lambda config, program: lambda *words: given.append(config))
    launch.launch(["train"], launch.LaunchOptions(nproc_per_node=3, max_restarts=2))
    assert given == [fewer(1, 1, 3, 2)]
