"""Server-sent events."""

import json


def events(text):
    """The chunks of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
