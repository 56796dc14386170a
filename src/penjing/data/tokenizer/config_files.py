"""The files beside tokenizer.json: tokenizer_config.json, chat templates, and the tokens that only these list."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from penjing.base.errors import UserError
from penjing.base.files import read_json


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise UserError("not a table", where=path, got=type(value).__name__)
    return value


def read_template(folder: Path) -> str:
    """The chat template of a folder, from any of the files that may hold it; empty if there is none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError("not valid UTF-8", where=path, got=f"byte {error.start}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_object(folder / name).get("chat_template")
        if isinstance(value, list):  # several templates, by name
            entries = [entry for entry in value if isinstance(entry, dict)]
            value = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
        if isinstance(value, str):
            return value
    return ""


def without_token_list(settings: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json without its list of tokens, which in transformers would override tokenizer.json's."""
    return {name: value for name, value in settings.items() if name != "added_tokens_decoder"}


def token_text(value: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which is a string or an object with flags."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None


def add_config_tokens(full: tokenizers.Tokenizer, settings: Mapping[str, Any], folder: Path) -> None:
    """Add the control tokens that only tokenizer_config.json lists, with its ids."""
    listed = settings.get("added_tokens_decoder") or {}
    existing = full.get_added_tokens_decoder()
    for index, token in sorted((int(index), token) for index, token in listed.items()):
        if index in existing or token_text(token) is None:
            continue
        flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "normalized", "single_word")}
        full.add_tokens([tokenizers.AddedToken(token["content"], special=bool(token.get("special")), **flags)])
        if full.token_to_id(token["content"]) != index:
            what = "tokenizer_config.json and tokenizer.json number the tokens differently"
            got = f"{token['content']} at {full.token_to_id(token['content'])}"
            raise UserError(what, where=folder, got=got, wanted=index)
