"""Files as people have them: web pages, archives, books, other encodings, other packers, standard input."""

import copy
import gzip
import io
import json
import re
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.data.formats import BadRecords, list_files, read_chats, read_documents, sniff, standard_input
from penjing.data.formats.encodings import guess_encoding, is_sure
from penjing.data.formats.html import LARGEST_PAGE_BYTES, decode_html, html_text

DIRTY = Path(__file__).parents[2] / "../shared/data/dirty"
needs_data = pytest.mark.skipif(not DIRTY.is_dir(), reason="the real files of ../shared/data are not here")

CHINESE = "话说天下大势，分久必合，合久必分。这是我们的国家，他来了。"
PARAGRAPHS = [
    "The first paragraph of the page, with a few words.",
    "A second one, which is longer than the first one is.",
]
PAGE = (
    "<html><head><title>A title</title><script>var nothing = '<p>no text</p>';</script></head><body>"
    "<nav><ul><li><a href='/'>Home</a></li><li><a href='/about'>About us</a></li></ul></nav><article>"
    + "".join(f"<p>{paragraph}</p>" for paragraph in PARAGRAPHS)
    + "</article><footer>Copyright</footer></body></html>"
)


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(*paths, **options):
    return [document.text for document in read_documents(list(paths), **options)]


def zst(raw):
    return pytest.importorskip("zstandard").compress(raw)


# --- encodings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "gb18030"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.txt.gz", "a.jsonl.zst"])
def test_other_encodings_are_converted_and_that_is_said_once(tmp_path, encoding, name):
    wanted = [CHINESE + f" {index}, with words." for index in range(60)]
    content = {
        "txt": "\n<|endoftext|>\n".join(wanted),
        "jsonl": "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in wanted),
        "json": json.dumps([{"text": text} for text in wanted], ensure_ascii=False),
        "csv": "text\r\n" + "".join(f'"{text}"\r\n' for text in wanted),
    }[name.split(".")[1]]
    raw = content.encode(encoding)
    packed = gzip.compress(raw) if name.endswith("gz") else zst(raw) if name.endswith("zst") else raw
    path = write(tmp_path / name, packed)
    with pytest.warns(UserWarning, match="not UTF-8") as said:
        assert [texts(path) for _ in range(2)] == [wanted] * 2
    assert len(said) == 1


def test_english_in_utf_16_without_a_mark(tmp_path):
    with pytest.warns(UserWarning, match="UTF-16LE"):
        assert (
            texts(write(tmp_path / "a.txt", "Some words, a caf\xe9.\n".encode("utf-16-le") * 9))[0].count("caf\xe9")
            == 9
        )


def surely(head):
    name = guess_encoding(head)
    return name if name and is_sure(head, name) else None


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива. ", "cp1251"),
        ("Все счастливые семьи похожи друг на друга, как он сказал так. ", "koi8-r"),
        ("ВСЕ СЧАСТЛИВЫЕ СЕМЬИ ПОХОЖИ ДРУГ НА ДРУГА, ОТ И ДО. ", "cp1251"),
        ("모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. ", "euc_kr"),
        ("吾輩は猫である。名前はまだ無い。どこで生れたか頓と見当がつかぬ。", "euc_jp"),
        ("吾輩は猫である。名前はまだ無い。どこで生れたか頓と見当がつかぬ。", "cp932"),
        ("Où êtes-vous allé cet été, mon élève préféré ? À la forêt. ", "latin-1"),
        ("ÉÉÉÀÀÀÇÇÇÊÊ ÙÙÙÙ ", "latin-1"),
        ("Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι. ", "cp1253"),
        ("本當是 " + "x" * 300, "gb18030"),  # three characters are no evidence
    ],
)
def test_what_is_not_surely_chinese_is_not_converted(text, encoding):
    assert surely((text * (1 if "x" in text else 30)).encode(encoding)) is None


def test_a_line_that_is_broken_in_another_encoding_is_one_broken_record(tmp_path):
    raw = "".join(json.dumps({"text": f"line {index}"}) + "\n" for index in range(3)).encode("utf-16")
    path = write(tmp_path / "a.jsonl", raw.replace("1".encode("utf-16-le"), b"\x00\xd8"))
    bad_records = BadRecords(max_bad_fraction=1)
    with pytest.warns(UserWarning, match="UTF-16"):
        assert texts(path, bad_records=bad_records) == ["line 0", "line 2"]
    assert bad_records.first == [f"{path}:2: not valid UTF-16"]


@needs_data
@pytest.mark.parametrize(
    "path", sorted((DIRTY / "encodings").glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_real_pages_are_decoded_in_their_encoding(path):
    raw = path.read_bytes()
    if path.parent.name == "EUC-TW":
        pytest.skip("Python has no codec")
    wider = {"GB2312": "gb18030", "Big5": "big5hkscs", "SHIFT_JIS": "cp932", "iso-8859-1": "cp1252", "CP949": "cp949"}
    truth = raw.decode(wider.get(path.parent.name, path.parent.name.removesuffix("-russian")))
    name = surely(raw)
    assert name is None or raw.decode(name).lstrip("\ufeff") == truth.lstrip("\ufeff")
    if path.suffix != ".srt":
        assert decode_html(raw).lstrip("\ufeff") == truth.lstrip("\ufeff")


# --- web pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.html", "a.htm", "a.xhtml", "a.HTML", "a.html.gz"])
def test_a_page_gives_its_text(tmp_path, name):
    raw = gzip.compress(PAGE.encode()) if name.endswith("gz") else PAGE.encode()
    assert texts(write(tmp_path / name, raw)) == ["\n".join(PARAGRAPHS)]
    assert sniff(tmp_path / name) == "documents"
    with raises_user_error(where=name, wanted="jsonl"):
        list(read_chats([tmp_path / name]))


def test_a_folder_of_pages(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.html", "a.htm", "deep/c.xhtml"):
        write(tmp_path / name, PAGE)
    write(tmp_path / "style.css", "p {}")
    with pytest.warns(UserWarning, match=r"\.css \(1\)"):
        assert len(texts(tmp_path)) == 3


def test_html_in_a_record_and_pieces_of_pages():
    assert html_text("<p>only a paragraph</p>") == "only a paragraph"
    assert html_text("no tags") == "no tags"
    assert html_text("") == html_text("<html></html>") == ""
    assert PARAGRAPHS[1] in html_text(PAGE, keep="main, fast")
    assert "Copyright" in html_text(PAGE, keep="all")


@pytest.mark.parametrize(
    "page",
    [
        "<div>" * 20_000 + "x" + "</div>" * 20_000,
        "<div><p>text</p>" * 20_000,
        "<a><b><i>x" * 50_000,
        "<b a=1><b a=2><b a=3>" * 100 + "<p>x" * 100_000,
        "<p " + " ".join(f"a{index}=1" for index in range(100_000)) + ">x</p>",
        "<table><tr><td>" * 20_000,
        "<" * 500_000,
        "<!--" * 200_000,
        "<p title='" * 100_000,
    ],
    ids=lambda page: page[:15],
)
@pytest.mark.parametrize("keep", ["main", "main, fast", "all"])
def test_hostile_pages_end_soon(page, keep):
    began = time.process_time()
    try:
        html_text(page, keep=keep)
    except UserError as error:
        assert "\n" not in error.line()
    assert time.process_time() - began < 5


def test_tags_in_scripts_do_not_nest():
    script = "<script>" + "document.write('<div><span>');" * 5000 + "</script>"
    assert html_text(f"<html><body>{script}<p>{PARAGRAPHS[0]}</p></body></html>") == PARAGRAPHS[0]


def test_a_page_of_more_than_the_limit_is_refused(tmp_path):
    path = write(tmp_path / "a.html", "<p>" + "word " * (LARGEST_PAGE_BYTES // 5))
    with raises_user_error(where="a.html"):
        texts(path)


def words(text):
    return Counter(re.findall(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+", text))


@needs_data
@pytest.mark.parametrize(("keep", "least"), [("main", 0.96), ("main, fast", 0.91)])
def test_the_main_text_of_real_pages(keep, least):
    lxml_html = pytest.importorskip("lxml.html")
    scores = []
    for page in sorted((DIRTY / "html").glob("*/source.html")):
        found = words(html_text(page.read_bytes(), keep=keep))
        wanted = words(lxml_html.fromstring(page.with_name("expected.html").read_text("utf-8")).text_content())
        scores.append(2 * (found & wanted).total() / (found.total() + wanted.total()))
    assert len(scores) == 37
    assert sum(scores) / len(scores) > least


# --- web archives and books ------------------------------------------------------------------------------------------


def warc(kind, content, mime="application/http; msgtype=response"):
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a.example/\r\nContent-Type: {mime}\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content + b"\r\n\r\n"


def answer(body, mime="text/html", status="200 OK", **headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {mime}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_an_archive_gives_its_pages_whatever_packs_them(tmp_path):
    page, chinese = PAGE.encode(), f"<p>{CHINESE}</p>".encode("gb18030")
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (page[:50], page[50:], b""))
    records = [
        warc("warcinfo", b"software: x", "application/warc-fields"),
        warc("request", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),
        warc("response", answer(page)),
        warc("response", answer(chinese, "text/html; charset=gb2312")),
        warc("response", answer(gzip.compress(page), **{"Content-Encoding": "gzip"})),
        warc("response", answer(page, **{"Content-Encoding": "gzip"})),  # unpacked by the crawler
        warc("response", answer(chunked, **{"Transfer-Encoding": "chunked"})),
        warc("response", answer(page, **{"Transfer-Encoding": "chunked"})),
        warc("response", answer(b"\x89PNG", "image/png")),
        warc("response", answer(page, status="404 Not Found")),
        warc("resource", page, "text/html"),
        warc("conversion", CHINESE.encode(), "text/plain"),
    ]
    for name, raw in [
        ("a.warc", b"".join(records)),
        ("a.warc.gz", b"".join(map(gzip.compress, records))),
        ("a.warc.zst", b"".join(map(zst, records))),
    ]:
        found = list(read_documents([write(tmp_path / name, raw)]))
        assert [document.line for document in found] == [3, 4, 5, 6, 7, 8, 11, 12]
        assert [document.text for document in found if CHINESE in document.text] == [CHINESE] * 2
        assert sum(PARAGRAPHS[1] in document.text for document in found) == 6


@needs_data
def test_real_archives():
    files = sorted((DIRTY / "dolma").glob("warc__*.warc.gz"))
    found = texts(*files)
    assert len(found) > len(files) == 2
    assert any("research" in text.lower() for text in found)


def book(chapters, encoding="utf-8"):
    stream = io.BytesIO()
    items = "".join(
        f'<item id="c{index}" href="text/{name.replace(" ", "%20")}" media-type="application/xhtml+xml"/>'
        for index, name in enumerate(chapters)
    )
    order = "".join(f'<itemref idref="c{index}"/>' for index in range(len(chapters)))
    package = f"""<?xml version="1.0"?><!DOCTYPE package [<!ENTITY x "y">]><package xmlns="http://www.idpf.org/2007/opf">
        <manifest><item id="n" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>{items}</manifest>
        <spine><itemref idref="n"/>{order}</spine></package>"""
    with zipfile.ZipFile(stream, "w") as archive:
        container = '<container><rootfiles><rootfile full-path="OEBPS/content.opf"/></rootfiles></container>'
        archive.writestr("META-INF/container.xml", container)
        archive.writestr("OEBPS/content.opf", package)
        archive.writestr("OEBPS/nav.xhtml", "<p>Contents</p>")
        for name, page in sorted(chapters.items()):
            archive.writestr(f"OEBPS/text/{name}", page.encode(encoding))
    return stream.getvalue()


def test_a_book_gives_its_chapters_in_their_order(tmp_path):
    pages = {
        f"{name}.xhtml": f"<?xml version='1.0' encoding='utf-8'?><html xmlns='http://www.w3.org/1999/xhtml'><body><h1>{name}"
        f"</h1><p>{CHINESE}</p><aside>A &amp; note.</aside></body></html>"
        for name in ("second chapter", "first")
    }
    found = list(read_documents([write(tmp_path / "a.epub", book(pages))]))
    assert [document.line for document in found] == [1, 2]
    for document, name in zip(found, ("second chapter", "first"), strict=True):
        assert document.text.split() == f"{name} {CHINESE} A & note.".split()


# --- packers, standard input -----------------------------------------------------------------------------------------


def test_a_zst_bomb_and_a_cut_one(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    packed = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(1000)) + compressor.flush()
    assert len(packed) < 200_000
    with raises_user_error(where="bomb.txt.zst:2"):
        texts(write(tmp_path / "bomb.txt.zst", packed))
    raw = "".join(json.dumps({"text": f"{index} {hash(str(index))}"}) + "\n" for index in range(9000)).encode()
    packed = zstandard.compress(raw)
    bad_records = BadRecords(max_bad_fraction=1)
    found = texts(write(tmp_path / "a.jsonl.zst", packed[: len(packed) // 2]), bad_records=bad_records)
    assert 0 < len(found) < 9000
    assert bad_records.unread == [f"{tmp_path / 'a.jsonl.zst'}:{len(found) + 1}"]


class Stdin:
    closed = False

    def __init__(self, raw, terminal=False):
        self.buffer, self.isatty = io.BytesIO(raw), lambda: terminal


@pytest.fixture
def stdin(monkeypatch):
    def give(raw, **options):
        standard_input.standard_input.cache_clear()
        monkeypatch.setattr(sys, "stdin", Stdin(raw, **options))

    yield give
    standard_input.standard_input.cache_clear()


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        ('\ufeff[ {"text": "a"}, {"text": "b"}]', ["a", "b"]),
        ("Plain words.\n", ["Plain words."]),
        ("[1] a note\n", ["[1] a note"]),
    ],
)
def test_standard_input_is_read_more_than_once(stdin, raw, wanted):
    stdin(raw.encode())
    assert texts("-") == wanted
    assert texts("-") == wanted
    assert list_files(["-"]) == list_files(["-"])
    assert {document.source for document in read_documents([Path("-")])} == {"-"}
    assert copy.copy(list_files(["-"])[0]).is_file(), "pickled, it can be opened too"


def test_standard_input_without_end_or_data(stdin, monkeypatch):
    monkeypatch.setattr(standard_input, "LARGEST_INPUT_BYTES", 1 << 21)
    stdin(b"yes\n" * (1 << 20))
    with raises_user_error(where="-", wanted="at most 2,097,152 bytes"):
        texts("-")
    stdin(b"", terminal=True)
    with raises_user_error(where="-", wanted="a pipe"):
        texts("-")
    stdin(b"")
    with raises_user_error(where="-"):
        texts("-")
