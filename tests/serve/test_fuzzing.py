"""F4: requests made up from our own description of the API, thousands of them, and never a fault of the server."""

import re
import shutil
import subprocess

import pytest

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
)
CASES = 5000


@pytest.mark.timeout(1600)
@pytest.mark.nightly
def test_thousands_of_made_up_requests(start, make_served, count):
    tool = shutil.which("schemathesis")
    if tool is None:
        pytest.skip("schemathesis is not installed")
    with start(make_served("chat"), make_served("base", answers=False), tools=["calculator"], max_tokens=16) as running:
        words = [
            "run",
            f"{running.url}/openapi.json",
            "--max-examples",
            "450",
            "--checks",
            CHECKS,
            "--seed",
            "1",
            "--no-color",
        ]
        done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=1500)
        cases = sum(map(int, re.findall(r"(\d+) generated", done.stdout)))
        assert done.returncode == 0, done.stdout[-5000:]
        assert cases >= CASES
        assert not [key for key in running.app.state.service.metrics.requests if key[1] >= 500]
        assert running.chat().status_code == 200
        count("made-up requests", cases)
