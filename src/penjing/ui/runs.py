"""The tab of runs: the list, live; one run's record; curves of several."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query
from starlette.responses import Response

from penjing.base.errors import UserError
from penjing.base.untrusted import Fields, text
from penjing.plan.prediction_history import compare
from penjing.serve.streams import DONE, EventStream, dumps, sse_event
from penjing.ui.curves import View, charts
from penjing.ui.live_runs import LiveRun, LiveRuns
from penjing.ui.processes import Trainings, command, log_tail
from penjing.ui.site import Site, run_in_thread
from penjing.ui.train import resuming

TICK_SECONDS = 0.5  # between two looks at the files
ALIVE_TICKS = 30  # between two events of an idle stream, so that a client that is gone is noticed
MOST_ROWS = 200  # incidents, and samples of a prompt
Names = Annotated[list[str], Query(max_length=50)]  # of runs in one chart


def add_routes(app: FastAPI, site: Site, trainings: Trainings) -> None:
    live = LiveRuns(site, trainings)

    @app.get("/api/runs")
    def list_runs() -> dict[str, Any]:
        return {"folder": str(site.folder), "runs": live.rows(search=True)}

    @app.get("/api/runs/events")
    async def run_events() -> Response:
        return EventStream(_events(live, site))

    @app.get("/api/run")
    def show_run(run: str) -> dict[str, Any]:
        one = live.run(run)
        words, _ = resuming(one.path, site.folder)
        return {**_details(one, trainings.state(one.name)), "command": command(words)}

    @app.get("/api/differences")
    def differences(run: Names) -> dict[str, list[str]]:
        """By setting, other than `out`, that is not the same in all of these runs: its value in each."""
        all_settings = [live.run(name).read().settings for name in run]
        values = {name: [one.get(name, "") for one in all_settings] for one in all_settings for name in one}
        return {name: found for name, found in values.items() if name != "out" and len(set(found)) > 1}

    @app.get("/api/curves")
    def draw(run: Names, view: Annotated[View, Depends()], small: bool = False) -> Response:
        runs = [live.run(name) for name in dict.fromkeys(run)]
        for one in runs:
            one.read()
        return Response(dumps({"charts": charts(runs, view, small=small)}), media_type="application/json")


async def _events(live: LiveRuns, site: Site) -> AsyncIterator[bytes]:
    """All rows at once, and again whenever one has changed."""
    shown, idle = None, 0
    while not site.is_closing():
        rows = await run_in_thread(live.rows, search=shown is None)  # a window may open at a run that just began
        if rows != shown or idle >= ALIVE_TICKS:
            yield sse_event({"folder": str(site.folder), "runs": rows})
            shown, idle = rows, 0
        idle += 1
        await asyncio.sleep(TICK_SECONDS)
    yield DONE


def _details(run: LiveRun, begun: str) -> dict[str, Any]:
    """What stands in a run's folder besides its curves."""
    row, record = run.row(begun), run.read()
    done = Fields() if row["state"] == "running" else record.outcome or record.ending(row["step"])
    so_far = {
        "steps_done": row["step"],
        "seconds": run.last("seconds"),
        "tokens": run.last("tokens"),
        "tokens_per_second": row["tokens_per_second"],
        "peak_memory_bytes": run.last("memory_bytes"),
    }
    try:
        terms = compare(record.plan.raw, done.raw if done else so_far) if record.plan else []
    except (UserError, ArithmeticError, TypeError, ValueError):  # files that somebody else has written
        terms = []
    return {
        **row,
        "settings": record.settings,
        "why": done.text("why"),
        "terms": [[term.name, term.unit, term.predicted, term.actual, term.error] for term in terms],
        "warnings": record.plan.texts("warnings"),
        "incidents": [_printable(incident.raw) for incident in record.incidents[-MOST_ROWS:]],
        "samples": [
            {"prompt": prompt, "language": language, "texts": list(texts.items())[-MOST_ROWS:]}
            for (prompt, language), texts in record.samples.items()
        ],
        "log": log_tail(run.path),
    }


def _printable(value: Any) -> Any:
    """JSON with NaN as text, and without lone surrogates: neither can be sent."""
    return json.loads(text(json.dumps(value, ensure_ascii=False)), parse_constant=str)
