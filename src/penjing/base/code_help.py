"""What the code says of settings and recipes, as help."""

import ast
import inspect
import io
import textwrap
import tokenize
from functools import cache


@cache
def field_comments(kind: type) -> dict[str, str]:
    """The comments of a dataclass's fields: beside a field and in the lines above it."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except (OSError, TypeError):  # no source, such as in a frozen program
            continue
        said = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]  # a class
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                above, line = list[str](), node.lineno - 1
                while line in said and lines[line - 1].lstrip().startswith("#"):
                    above.insert(0, said[line])
                    line -= 1
                beside = [
                    said[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in said
                ]
                found[node.target.id] = " ".join([*above, *beside])
    return found


def summary(thing: object) -> str:
    """The first paragraph of what the code says of it, or of its module."""
    said = inspect.getdoc(thing) or inspect.getdoc(inspect.getmodule(thing)) or ""
    return said.partition("\n\n")[0].replace("\n", " ")
