"""Blind votes: the strengths' maths, the file of votes, and the card in a browser."""

import json
import math

import numpy as np
import pytest

from penjing.ui.bradley_terry import strengths

PAIR = {"first": "runs/a@10", "second": "runs/b@20"}  # of the fixture `models`


def ask(client, **more):
    return client.post("/api/blind/ask", json={**PAIR, "question": "Who?", **more})


def test_two_models_have_the_log_odds_of_their_votes_with_a_tie_as_half_a_vote_each():
    votes = [("a", "b", 1.0)] * 7 + [("b", "a", 1.0)] * 3 + [("a", "b", 0.5)] * 2
    ((a, b),) = strengths(votes)
    won, lost = 8 + 0.5, 4 + 0.5  # and half a vote more for each
    assert a.strength - b.strength == pytest.approx(math.log(won / lost))
    assert a.high - a.low == pytest.approx(2 * 1.959964 * math.sqrt(1 / won + 1 / lost) / 2)  # of half the difference
    assert a.strength == pytest.approx(-b.strength) and (a.won, a.tied, a.lost) == (7, 2, 3)


def test_at_the_maximum_each_model_has_as_many_votes_as_is_expected_of_it():
    rng, names = np.random.default_rng(0), "abcd"
    votes = [(*rng.permutation(list(names))[:2].tolist(), rng.integers(3) / 2) for _ in range(40)]
    (rows,) = strengths(votes)
    theta = {row.model: row.strength for row in rows}
    assert sum(theta.values()) == pytest.approx(0, abs=1e-9)
    halves = [(x, y, 0.5) for x in names for y in names if x < y]  # that are added: one tie for each pair
    for name in names:
        mine = [(y, score) if x == name else (x, 1 - score) for x, y, score in votes + halves if name in (x, y)]
        expected = sum(1 / (1 + math.exp(theta[other] - theta[name])) for other, _ in mine)
        assert sum(score for _, score in mine) == pytest.approx(expected)


def test_the_intervals_hold_the_truth_and_groups_are_apart():
    rng, true = np.random.default_rng(0), {"a": 0.8, "b": 0.1, "c": -0.9}
    inside = []
    for _ in range(150):
        pairs = [rng.permutation(list(true))[:2].tolist() for _ in range(60)]
        votes = [(x, y, float(rng.random() < 1 / (1 + math.exp(true[y] - true[x])))) for x, y in pairs]
        (rows,) = strengths(votes)
        inside += [row.low <= true[row.model] <= row.high for row in rows]
    assert 0.92 < np.mean(inside) < 0.99
    apart = strengths([("a", "b", 1.0)] * 5000 + [("c", "d", 0.0)])
    assert [[row.model for row in group] for group in apart] == [["a", "b"], ["d", "c"]]
    assert all(math.isfinite(row.high) for group in apart for row in group)
    assert strengths([]) == []


def test_a_vote_that_cannot_be_written_may_be_given_again(client, folder, models):
    asked = {"id": ask(client).json()["id"], "vote": "a"}
    (folder / "votes.jsonl").mkdir()
    assert client.post("/api/blind/vote", json=asked).status_code == 400
    (folder / "votes.jsonl").rmdir()
    assert [client.post("/api/blind/vote", json=asked).status_code for _ in range(2)] == [200, 404]


def test_names_come_after_the_vote_and_votes_are_kept(client, folder, models):
    assert client.get("/api/blind").json() == {"groups": []}
    (folder / "votes.jsonl").write_text('{"a": 5}\nnothing\n{"a": "x", "b": "y", "vo')  # the last one is cut
    firsts = []
    for _ in range(12):
        asked = ask(client).json()
        assert asked.keys() == {"id", "a", "b"}
        told = client.post("/api/blind/vote", json={"id": asked["id"], "vote": "a"}).json()
        assert {told["a"], told["b"]} == set(PAIR.values())
        assert asked["a"] == ("Who? http://a/" if told["a"] == PAIR["first"] else "Who? http://b/")
        firsts.append(told["a"])
        again = client.post("/api/blind/vote", json={"id": asked["id"], "vote": "b"})
        assert again.status_code == 404, "one vote for a question"
    assert len(set(firsts)) == 2, "the order is random; the same one twelve times has a chance of 1 in 2048"
    lines = (folder / "votes.jsonl").read_text().splitlines()
    assert len(lines) == 15
    assert json.loads(lines[-1]).keys() == {"at", "question", "a", "b", "answer_a", "answer_b", "vote"}
    rows = {row["model"]: row for (group,) in [told["groups"]] for row in group}
    assert rows[PAIR["first"]]["won"] == firsts.count(PAIR["first"])
    assert client.get("/api/blind").json()["groups"] == told["groups"]


@pytest.mark.parametrize("more", [{"second": "runs/c@30"}, {"second": "runs/a@10"}, {"first": "../x@1"}])
def test_only_two_loaded_checkpoints_are_asked(client, models, more):
    assert ask(client, **more).status_code == 409


def test_a_vote_is_one_of_four_and_no_link_is_followed(client, folder, models, tmp_path_factory):
    asked = ask(client).json()
    assert client.post("/api/blind/vote", json={"id": asked["id"], "vote": "c"}).status_code == 400
    outside = tmp_path_factory.mktemp("outside") / "file"
    (folder / "votes.jsonl").symlink_to(outside)
    assert client.post("/api/blind/vote", json={"id": asked["id"], "vote": "tie"}).status_code == 400
    assert not outside.exists()
