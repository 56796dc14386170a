"""What the app refuses: it may start programs, so only a holder of the token, on this page, inside this folder."""

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import penjing
from penjing.report.metrics import CHARTS, SMALL_CHARTS
from penjing.serve.errors import ApiError
from penjing.ui.app import CHAT_PAGE, PAGE, SHARED, make_app
from penjing.ui.site import Site

TOKEN = "right-token"
HERE = "http://127.0.0.1:7861"
KEY = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def client(tmp_path):
    return TestClient(make_app(Site(tmp_path), TOKEN), base_url=HERE)


def every_route(client):
    return [
        (route.path, method)
        for route in client.app.routes
        if route.path.startswith("/api/")
        for method in route.methods
    ]


def refusal(response):
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, (401, "invalid_api_key")),
        ({"Authorization": "Bearer wrong"}, (401, "invalid_api_key")),
        ({"Authorization": f"Basic {TOKEN}"}, (401, "invalid_api_key")),
        ({"Authorization": "Bearer rïght-token".encode("latin-1")}, (401, "invalid_api_key")),
        ({**KEY, "Host": "evil.example:7861"}, (403, "wrong_host")),
        ({**KEY, "Origin": "http://evil.example"}, (403, "wrong_origin")),
        ({**KEY, "Origin": "http://127.0.0.1:8000"}, (403, "wrong_origin")),
        ({**KEY, "Origin": "null"}, (403, "wrong_origin")),
        ({**KEY, "Sec-Fetch-Site": "cross-site"}, (403, "wrong_origin")),
        ({**KEY, "Sec-Fetch-Site": "same-site"}, (403, "wrong_origin")),
    ],
)
def test_no_route_answers_a_request_that_is_not_the_pages(client, headers, wanted):
    routes = every_route(client)
    assert routes
    for path, method in routes:
        assert refusal(client.request(method, path, headers=headers)) == wanted, path


def test_the_page_itself_is_answered(client):
    assert client.get("/api/runs", headers={**KEY, "Origin": HERE, "Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_a_post_needs_the_content_type_that_no_form_sends(client):
    for path, method in every_route(client):
        if method == "POST":
            response = client.post(path, headers={**KEY, "Content-Type": "text/plain"}, content=b"{}")
            assert refusal(response) == (400, "wrong_content_type"), path


def test_files_of_the_page_need_no_token_and_run_no_foreign_script(client):
    names = {file.name for file in PAGE.iterdir() if file.is_file()}
    assert not names & set(SHARED), "a file of the chat page would be hidden"
    for name in (*names - {"index.html"}, *SHARED, "", "uplot.js"):
        response = client.get(f"/{name}")
        assert response.status_code == 200, name
        assert client.head(f"/{name}").headers == response.headers, "as `curl -I` asks"
        assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert not re.search(r"<script>|<style|style=|\son\w+=|https?://", (PAGE / "index.html").read_text())


@pytest.mark.parametrize("name", ["..", "../x", "/etc/passwd", "a/../../x", "out", "out/x", "\0"])
def test_paths_stay_inside_the_folder(tmp_path, name):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "out").symlink_to(tmp_path)
    site = Site(tmp_path / "site")
    with pytest.raises(ApiError, match="outside the folder"):
        site.path(name)
    assert site.path("runs/a") == (tmp_path / "site" / "runs" / "a").resolve()


@pytest.mark.parametrize("value", ["a.jsonl,/etc/passwd", "a:../b", '["x", "../y"]', "~/x", "~root", "f=/x", "{../a}"])
def test_so_do_the_paths_in_a_value(tmp_path, value):
    with pytest.raises(ApiError, match="outside the folder"):
        Site(tmp_path).check_value(value)


def test_other_values_are_taken(tmp_path):
    for value in (
        "26m",
        "3e-4",
        "toyworld",
        "data/a.jsonl,data/b.jsonl:0.5",
        "Qwen/Qwen3-0.6B",
        "blocks.[0-3].*",
        "true",
    ):
        Site(tmp_path).check_value(value)


def words_of(file: Path) -> list[set[str]]:
    """The keys of the words, for English and Chinese."""
    patterns = (r"^  (\w+): \[", r"^  (\w+): \[\".+\", \".+\"\],$")
    return [set(re.findall(pattern, file.read_text(), flags=re.M)) for pattern in patterns]


def test_both_languages_are_whole():
    files = list(PAGE.glob("*words.js"))
    known = set(re.findall(r"^  (\w+):", (CHAT_PAGE / "sentences.js").read_text(), flags=re.M))
    for file in files:
        english, chinese = words_of(file)
        assert english == chinese and english, file
        tab = file.name.removesuffix("words.js").rstrip("_") or "ui"
        assert all(key.startswith(tab) for key in english), "a key begins with the name of its tab"
        known |= english
    used = set()
    for file in PAGE.glob("*.js"):
        used |= set(re.findall(r"\bt\(\"(\w+)\"", file.read_text()))
    used |= set(re.findall(r"data-i18n(?:-[\w-]+)?=\"(\w+)\"", (PAGE / "index.html").read_text()))
    assert used <= known and len(files) == 6


def words_of_the_server() -> list[str]:
    """What the page translates, in words.js."""
    table = (PAGE / "words.js").read_text().partition("const CHINESE = {")[2].partition("\n};")[0]
    return re.findall(r'"([^"]+)": "[^"]+"', table)


def test_the_server_still_says_what_the_page_translates():
    sources = "\n".join(file.read_text() for file in Path(penjing.__file__).parent.rglob("*.py"))
    words = words_of_the_server()
    assert len(words) > 70 and [text for text in words if text not in sources] == []
    assert len(set(words)) == len(words)


def test_a_chart_has_chinese_words():
    charts = (*CHARTS, *SMALL_CHARTS)
    wanted = {word for chart in charts for word in (chart.unit, chart.label, *(label for _, label in chart.extras))}
    assert wanted - set(words_of_the_server()) == set()


def test_no_file_of_the_page_parses_text_as_html():
    for file in PAGE.glob("*.js"):
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file
        )
        assert len(text.splitlines()) < 300, file
