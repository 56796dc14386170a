"""Files as they come from disks, downloads, editors and spreadsheets, none of them quite right, for every reader.

name -> (what makes its bytes of one good line of the reader's kind, what reading it gives). The latter is (good,
broken, left out), by reader where it depends on that: only documents are read from plain text, and only they are in
the tables here.
"""

import gzip
import io
import zipfile

ALL, DOCUMENTS = "all", "documents"


def inside(good, raw):
    """The good line with these bytes at the end of its last text."""
    at = good.rindex(b'"')
    return good[:at] + raw + good[at:]


def lines(*parts):
    return b"".join(part + b"\n" for part in parts)


def packed(raw):
    return gzip.compress(raw, mtime=0)


def columns(names):
    """A parquet file of three rows."""
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({name: ["a", "b", "c"] for name in names}), stream)
    return stream.getvalue()


def in_utf(name):
    return lambda good: lines(*[good] * 50).decode().encode(name)


ENCODED = {
    "utf16.jsonl": (in_utf("utf-16"), (50, 0, 0)),
    "utf16_little.jsonl": (in_utf("utf-16-le"), (50, 0, 0)),
    "utf16_big.jsonl": (in_utf("utf-16-be"), (50, 0, 0)),
    "utf32.jsonl": (in_utf("utf-32"), (50, 0, 0)),
    # Damaged: half a pair in the last line, and an odd byte at the end
    "utf16_half.jsonl": (lambda good: in_utf("utf-16")(good)[:-4] + b"\x00\xd8\n\x00", (49, 1, 0)),
    "utf16_odd.jsonl": (lambda good: in_utf("utf-16")(good) + b"{", (50, 1, 0)),
    "gbk_then_utf8.jsonl": (
        lambda good: lines(*[inside(good, "这是我们的国家，他来了。".encode("gbk"))] * 9, inside(good, "好".encode())),
        (1, 9, 0),
    ),
    "bom_alone.jsonl": (lambda good: b"\xef\xbb\xbf", (0, 0, 1)),
    "bom_first.jsonl": (lambda good: b"\xef\xbb\xbf" + lines(good, good), (2, 0, 0)),
    "bom_twice.jsonl": (lambda good: b"\xef\xbb\xbf\xef\xbb\xbf" + lines(good, good), (1, 1, 0)),
    "bom_later.jsonl": (lambda good: lines(good, b"\xef\xbb\xbf" + good, good), (2, 1, 0)),
    "latin1.jsonl": (lambda good: lines(good, inside(good, b"caf\xe9"), good), (2, 1, 0)),
    "gbk.jsonl": (lambda good: lines(good, inside(good, "话说天下大势".encode("gbk"))), (1, 1, 0)),
    "overlong.jsonl": (lambda good: lines(good, inside(good, b"\xc0\xaf")), (1, 1, 0)),
    "surrogates_as_bytes.jsonl": (lambda good: lines(good, inside(good, b"\xed\xa0\xbd\xed\xb8\x80")), (1, 1, 0)),
    "beyond_unicode.jsonl": (lambda good: lines(good, inside(good, b"\xf4\x90\x80\x80")), (1, 1, 0)),
    "half_a_character.jsonl": (lambda good: lines(good, inside(good, b"\\ud83d")), (1, 1, 0)),
    "halves_swapped.jsonl": (lambda good: lines(good, inside(good, b"\\ude00\\ud83d")), (1, 1, 0)),
    "whole_pair.jsonl": (lambda good: lines(good, inside(good, b"\\ud83d\\ude00")), (2, 0, 0)),
    "zero_escaped.jsonl": (lambda good: lines(good, inside(good, b"\\u0000")), (1, 1, 0)),
    "zero_raw.jsonl": (lambda good: lines(good, inside(good, b"\0")), (1, 1, 0)),
    "tab_raw.jsonl": (lambda good: lines(good, inside(good, b"\t")), (1, 1, 0)),
    "bad_escape.jsonl": (lambda good: lines(good, inside(good, b"\\x41")), (1, 1, 0)),
    "other_line_ends.jsonl": (lambda good: lines(good, inside(good, "\u2028\u2029\u0085".encode())), (2, 0, 0)),
}  # fmt: skip

LINES = {
    "empty.jsonl": (lambda good: b"", (0, 0, 1)),
    "blank.jsonl": (lambda good: b"\n \n\t\n", (0, 0, 1)),
    "blank_between.jsonl": (lambda good: lines(good, b"", b" \t", good), (2, 0, 0)),
    "windows.jsonl": (lambda good: lines(good + b"\r", good + b"\r"), (2, 0, 0)),
    "old_mac.jsonl": (lambda good: good + b"\r" + good + b"\r", (0, 1, 0)),
    "no_last_end.jsonl": (lambda good: good + b"\n" + good, (2, 0, 0)),
    "cut.jsonl": (lambda good: good + b"\n" + good[:-4], (1, 1, 0)),
    "begins_in_the_middle.jsonl": (lambda good: good[5:] + b"\n" + good, (1, 1, 0)),
    "torn.jsonl": (lambda good: good[:9] + lines(good, good), (1, 1, 0)),
    "two_in_a_line.jsonl": (lambda good: lines(good + good, good), (1, 1, 0)),
    "one_over_two_lines.jsonl": (lambda good: lines(good, good[:9], good[9:]), (1, 2, 0)),
    "zeros.jsonl": (lambda good: bytes(5000), (0, 1, 0)),
    "zeros_at_the_end.jsonl": (lambda good: lines(good) + bytes(4096), (1, 1, 0)),
    "zeros_between.jsonl": (lambda good: lines(good, bytes(4096), good), (2, 1, 0)),
    "merge_conflict.jsonl": (
        lambda good: lines(b"<<<<<<< HEAD", good, b"=======", good, b">>>>>>> other"), (2, 3, 0)
    ),
    "comments.jsonl": (lambda good: lines(b"// made by hand", b"# made by hand", good), (1, 2, 0)),
    "commas_after.jsonl": (lambda good: lines(good + b",", good + b","), (0, 2, 0)),
    "single_quotes.jsonl": (lambda good: lines(good.replace(b'"', b"'"), good), (1, 1, 0)),
    "curly_quotes.jsonl": (lambda good: lines(good.replace(b'"', "”".encode()), good), (1, 1, 0)),
    "python.jsonl": (lambda good: lines(good, b"{'text': None}", b"None"), (1, 2, 0)),
    "pretty.jsonl": (lambda good: b"{\n" + good[1:] + b"\n{\n" + good[1:] + b"\n", (2, 0, 0)),
    "array.jsonl": (lambda good: b"[" + good + b",\n" + good + b"]", (2, 0, 0)),
    "array_in_a_line.jsonl": (lambda good: lines(good, b"[" + good + b"]"), (1, 1, 0)),
    "quoted.jsonl": (lambda good: lines(good, b'"' + good.replace(b'"', b'\\"') + b'"'), (2, 0, 0)),
    "values.jsonl": (lambda good: lines(good, b"1", b"null", b'"x"', b"true", b"{}"), (1, 5, 0)),
    "many_fields.jsonl": (
        lambda good: lines(good, b"{" + b",".join(b'"k%d":0' % index for index in range(50_000)) + b"}"), (1, 1, 0)
    ),
    "twice_a_field.jsonl": (lambda good: lines(good, b'{"x": 1, "x": 2}'), (1, 1, 0)),
    "deep.jsonl": (lambda good: lines(good, b"{" + b'"a":{' * 100_000, good), (2, 1, 0)),
    "deep_and_closed.jsonl": (lambda good: lines(good, b'{"a":' * 50_000 + b"1" + b"}" * 50_000), (1, 1, 0)),
    "huge_integer.jsonl": (lambda good: lines(good, b'{"text": ' + b"9" * 6000 + b"}"), (1, 1, 0)),
    "far_to_the_right.jsonl": (lambda good: lines(good, b" " * 1_000_000 + good), (2, 0, 0)),
    "nothing_said.jsonl": (
        # A prompt's question may be empty; what one is to learn from may not.
        lambda good: lines(good, good[: good.rindex(b'"', 0, good.rindex(b'"'))] + good[good.rindex(b'"') :].replace(
            b'"', b'""', 1)),
        {ALL: (1, 0, 1), "prompts": (2, 0, 0)},
    ),
    "web_page.jsonl": (lambda good: lines(b"<!DOCTYPE html>", b"<html>", b"404", b"</html>"), (0, 4, 0)),
    "pointer.jsonl": (lambda good: lines(b"version https://git-lfs.github.com/spec/v1", b"oid", b"size"), (0, 3, 0)),
    "table.jsonl": (lambda good: lines(b"text,label", b"a,1"), (0, 2, 0)),
    "all_bytes.jsonl": (lambda good: bytes(range(256)) * 40, (0, 41, 0)),
    "program.jsonl": (lambda good: b"\x7fELF\x02\x01\x01" + bytes(500), (0, 1, 0)),
    "picture.jsonl": (lambda good: b"\x89PNG\r\n\x1a\n" + bytes(100), (0, 3, 0)),
}  # fmt: skip

VALUES = {
    "empty.json": (lambda good: b"", (0, 0, 1)),
    "nothing.json": (lambda good: b"[]", (0, 0, 1)),
    "unclosed.json": (lambda good: b"[" + good + b", " + good, (2, 1, 0)),
    "half.json": (lambda good: b"[" + good + b", " + good[:-4], (1, 1, 0)),
    "text_after.json": (lambda good: b"[" + good + b"] x", (1, 1, 0)),
    "record_after.json": (lambda good: b"[" + good + b"] " + good, (1, 1, 0)),
    "commas.json": (lambda good: b"[,,,]", (0, 1, 0)),
    "comma_after.json": (lambda good: b"[" + good + b",]", (1, 1, 0)),
    "no_comma.json": (lambda good: b"[" + good + b" " + good + b"]", (1, 1, 0)),
    "deep.json": (lambda good: b"[" * 200_000, (0, 1, 0)),
    "number.json": (lambda good: b"3" * 10_000, (0, 1, 0)),
    "scalars.json": (lambda good: b'[1, null, "x", true, NaN]', (0, 5, 0)),
    "mixed.json": (lambda good: b"[" + b", ".join([good, b"1", good, b"[]"]) + b"]", (2, 2, 0)),
    "array_of_arrays.json": (lambda good: b"[[" + good + b", " + good + b"]]", (0, 1, 0)),
    "bom.json": (lambda good: b"\xef\xbb\xbf[" + good + b"]", (1, 0, 0)),
    "gbk.json": (lambda good: b"[" + inside(good, "话说天下大势".encode("gbk")) + b"]", (0, 1, 0)),
    "utf16.json": (lambda good: (b"[" + good + b"]").decode().encode("utf-16"), (1, 0, 0)),
    "zeros.json": (lambda good: bytes(1000), (0, 1, 0)),
    "nothing_between.json": (lambda good: good + good, (2, 0, 0)),
    "lines.json": (lambda good: lines(good, b"{broken", good), (2, 1, 0)),
    "single_quotes.json": (lambda good: b"[{'text': 'a'}]", (0, 1, 0)),
}

PACKED = {
    "empty.jsonl.gz": (lambda good: b"", (0, 0, 1)),
    "of_nothing.jsonl.gz": (lambda good: packed(b""), (0, 0, 1)),
    "not.jsonl.gz": (lambda good: lines(good), (0, 1, 0)),
    "cut_head.jsonl.gz": (lambda good: packed(lines(good))[:8], (0, 1, 0)),
    "text_after.jsonl.gz": (lambda good: packed(lines(*[good] * 5)) + b"rubbish after it", (5, 1, 0)),
    "zeros_after.jsonl.gz": (lambda good: packed(lines(*[good] * 5)) + bytes(512), (5, 0, 0)),
    "wrong_sum.jsonl.gz": (lambda good: packed(lines(*[good] * 500))[:-8] + bytes(8), (500, 1, 0)),
    "no_sum.jsonl.gz": (lambda good: packed(lines(*[good] * 500))[:-8], (500, 1, 0)),
    "two_members.jsonl.gz": (lambda good: packed(lines(good)) + packed(lines(good)), (2, 0, 0)),
    "a_line_in_two_members.jsonl.gz": (lambda good: packed(good[:9]) + packed(good[9:]), (1, 0, 0)),
    "empty.jsonl.zst": (lambda good: b"", (0, 0, 1)),
    "not.jsonl.zst": (lambda good: lines(good), (0, 1, 0)),
    "cut_head.jsonl.zst": (lambda good: zst(lines(good))[:5], (0, 1, 0)),
    "cut.jsonl.zst": (lambda good: zst(lines(good)) + zst(lines(good))[:-3], (1, 1, 0)),
    "text_after.jsonl.zst": (lambda good: zst(lines(*[good] * 5)) + b"rubbish after it", (5, 1, 0)),
    "two_frames.jsonl.zst": (lambda good: zst(lines(good)) + zst(lines(good)), (2, 0, 0)),
    "a_line_in_two_frames.jsonl.zst": (lambda good: zst(good[:9]) + zst(good[9:]), (1, 0, 0)),
    "skipped_frame.jsonl.zst": (lambda good: b"\x50\x2a\x4d\x18\4\0\0\0abcd" + zst(lines(good)), (1, 0, 0)),
}  # fmt: skip

PAGE = b"<html><head><title>t</title></head><body><p>A page of a few words.</p></body></html>"


def texts(files):
    """Text of other kinds than documents is one broken record: the file."""
    return {
        name: (lambda good, raw=raw: raw, wanted if isinstance(wanted, dict) else {DOCUMENTS: wanted, ALL: (0, 1, 0)})
        for name, (raw, wanted) in files.items()
    }


def zst(raw):
    import zstandard

    return zstandard.compress(raw)


def warc(*pages, kind="response", length=0):
    """A web archive of these pages. length: of each, added to the right one."""
    raw = b""
    for page in pages:
        body = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + page
        head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: application/http\r\n"
        raw += f"{head}Content-Length: {len(body) + length}\r\n\r\n".encode() + body + b"\r\n\r\n"
    return raw


def epub(chapters, spine=None, **others):
    """A book. chapters: name -> page. spine: the names in their order, also of what is not there."""
    stream = io.BytesIO()
    spine = list(chapters) if spine is None else spine
    items = "".join(f'<item id="{name}" href="{name}" media-type="application/xhtml+xml"/>' for name in spine)
    order = "".join(f'<itemref idref="{name}"/>' for name in spine)
    files = {
        "META-INF/container.xml": '<container xmlns="c"><rootfile full-path="p/a.opf"/></container>',
        "p/a.opf": f'<package xmlns="o"><manifest>{items}</manifest><spine>{order}</spine></package>',
        **{f"p/{name}": page for name, page in chapters.items()},
        **others,
    }
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as book:
        for name, content in files.items():
            if content is not None:
                book.writestr(name, content)
    return stream.getvalue()


PLAIN = texts({
    "empty.txt": (b"", (0, 0, 1)),
    "blank.txt": (b"\n \n\n", (0, 0, 1)),
    "zeros.txt": (bytes(3000), (0, 1, 0)),
    "gbk.txt": (("话说天下大势，分久必合，合久必分。\n" * 50).encode("gbk"), (1, 0, 0)),
    "gbk_cut.txt": (("话说天下大势，分久必合，合久必分。\n" * 50).encode("gbk")[:-2], (0, 1, 0)),
    "big5.txt": (("他說這是我們的國家，不在這裡了。\n" * 50).encode("big5"), (1, 0, 0)),
    "koi8.txt": (("Все счастливые семьи похожи друг на друга.\n" * 9).encode("koi8-r"), (0, 1, 0)),
    "korean.txt": (("모든 인간은 태어날 때부터 자유로우며.\n" * 9).encode("euc-kr"), (0, 1, 0)),
    "utf16.txt": (("a line\n" * 50).encode("utf-16"), (1, 0, 0)),
    "all_bytes.txt": (bytes(range(256)) * 40, (0, 1, 0)),
    "latin1.py": (b"# caf\xe9\nprint(1)\n", (0, 1, 0)),
})  # fmt: skip

PAGES = texts({
    "page.html": (PAGE, (1, 0, 0)),
    "no_tags.htm": (b"only words", (1, 0, 0)),
    "empty.html": (b"", (0, 0, 1)),
    "blank.html": (b" \n\n", (0, 0, 1)),
    "no_text.html": (b"<html><body><img src=a></body></html>", (0, 0, 1)),
    "cut.html": (PAGE[:-20], (1, 0, 0)),
    "zeros.html": (bytes(3000), (0, 1, 0)),
    "picture.html": (b"\x89PNG\r\n\x1a\n" + bytes(100), (0, 1, 0)),
    "controls.html": (bytes(range(1, 256)) * 40, (0, 1, 0)),
    "deep.html": (b"<div>" * 20_000 + b"x" + b"</div>" * 20_000, (0, 1, 0)),
    "deep_marks.html": (b"<a><b><i>x" * 100_000, (0, 1, 0)),
    "deep_with_text.xhtml": (b"<div>" * 900 + b"some words" + b"</div>" * 900, (1, 0, 0)),
    "attributes.html": (b"<p " + b" ".join(b"a%d=1" % index for index in range(50_000)) + b">x</p>", (0, 1, 0)),
    "gbk.html": ("<meta charset=gbk><p>这是我们的国家。</p>".encode("gbk"), (1, 0, 0)),
    "wrong_charset.html": ("<meta charset=nonsense><p>caf\xe9 au lait</p>".encode("latin1"), (1, 0, 0)),
    "utf16.html": (PAGE.decode().encode("utf-16"), (1, 0, 0)),
    "page.html.gz": (packed(PAGE), (1, 0, 0)),
    "cut.html.gz": (packed(PAGE)[:-9], (0, 1, 0)),
})  # fmt: skip

ARCHIVES = texts({
    "two.warc": (warc(PAGE, PAGE), (2, 0, 0)),
    "two.warc.gz": (packed(warc(PAGE)) + packed(warc(PAGE)), (2, 0, 0)),
    "two.warc.zst": (zst(warc(PAGE, PAGE)), (2, 0, 0)),
    "empty.warc": (b"", (0, 0, 1)),
    "requests.warc": (warc(PAGE, kind="request"), (0, 0, 1)),
    "cut.warc": (warc(PAGE, PAGE)[:-40], (1, 1, 0)),
    "cut.warc.gz": (packed(warc(PAGE)) + packed(warc(PAGE))[:-9], (1, 1, 0)),
    "cut_head.warc": (warc(PAGE, PAGE)[: len(warc(PAGE)) + 30], (1, 1, 0)),
    "too_long.warc": (warc(PAGE, PAGE, length=30), (0, 1, 0)),
    "too_short.warc": (warc(PAGE, PAGE, length=-30), (0, 1, 0)),
    "negative.warc": (warc(PAGE, length=-5000), (0, 1, 0)),
    "nonsense.warc": (b"hello\n" * 50, (0, 1, 0)),
    "nonsense_between.warc": (warc(PAGE) + b"rubbish\r\n" * 5 + warc(PAGE), (0, 1, 0)),
    "zeros.warc": (bytes(3000), (0, 1, 0)),
    "head.warc": (b"WARC/1.0\r\n" + b"X: " + b"a" * 5_000_000 + b"\r\n\r\n", (0, 1, 0)),
    "deep.warc": (warc(PAGE, b"<div>" * 20_000, PAGE), (2, 1, 0)),
    "zero_byte.warc": (warc(PAGE, PAGE + b"\0", PAGE), (2, 1, 0)),
})  # fmt: skip

BOOKS = texts({
    "book.epub": (epub({"a.xhtml": PAGE, "b.xhtml": PAGE}), (2, 0, 0)),
    "empty.epub": (b"", (0, 1, 0)),
    "nonsense.epub": (b"PK\x03\x04 nonsense", (0, 1, 0)),
    "cut.epub": (epub({"a.xhtml": PAGE})[:-30], (0, 1, 0)),
    "no_package.epub": (epub({"a.xhtml": PAGE}, **{"p/a.opf": None}), (0, 1, 0)),
    "broken_package.epub": (epub({"a.xhtml": PAGE}, **{"p/a.opf": "<package"}), (0, 1, 0)),
    "no_container.epub": (epub({"a.xhtml": PAGE}, **{"META-INF/container.xml": None}), (0, 1, 0)),
    "no_chapters.epub": (epub({}), (0, 1, 0)),
    "lost_chapter.epub": (epub({"a.xhtml": PAGE}, ["a.xhtml", "gone.xhtml", "a.xhtml"]), (1, 1, 0)),
    "blank_chapter.epub": (epub({"a.xhtml": PAGE, "b.xhtml": b"<html/>"}), (1, 0, 1)),
    "broken_chapter.epub": (epub({"a.xhtml": PAGE, "b.xhtml": bytes(50)}), (1, 1, 0)),
    "deep_chapter.epub": (epub({"a.xhtml": PAGE, "b.xhtml": b"<div>" * 20_000}), (1, 1, 0)),
    "escape.epub": (epub({"a.xhtml": PAGE}, ["a.xhtml", "../../../etc/passwd"]), (1, 1, 0)),
    "entities.epub": (
        epub({}, **{"p/a.opf": '<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;">]><package>&c;</package>'}), (0, 1, 0)
    ),
    "locked.epub": (
        epub({"a.xhtml": PAGE}, **{"META-INF/encryption.xml": '<e Algorithm="http://www.w3.org/2001/04/xmlenc#aes128-cbc"/>'}),
        (0, 1, 0),
    ),
    "bomb.epub": (epub({"a.xhtml": b"<p>" + b" " * (80 << 20)}), (0, 1, 0)),
})  # fmt: skip

TABLES = {
    "names_only.csv": (lambda good: b"text\n", (0, 0, 1)),
    "other_names.csv": (lambda good: b"a,b\n1,2\n3,4\n", (0, 2, 0)),
    "semicolons.csv": (lambda good: b"id;text\n1;a\n2;b\n", {DOCUMENTS: (2, 0, 0), ALL: (0, 2, 0)}),
    "open_quote.csv": (lambda good: b'text\na\n"never closed\nb\n', {DOCUMENTS: (1, 1, 0), ALL: (0, 2, 0)}),
    "ragged.csv": (lambda good: b"id,text\n1,x\n2\n3,y,z\n4,w\n", {DOCUMENTS: (2, 2, 0), ALL: (0, 4, 0)}),
    "latin1.csv": (lambda good: b"text\ncaf\xe9\nplain\n", {DOCUMENTS: (1, 1, 0), ALL: (0, 2, 0)}),
    "zero_byte.csv": (lambda good: b"text\na\0b\nplain\n", {DOCUMENTS: (1, 1, 0), ALL: (0, 2, 0)}),
    "empty_cell.csv": (lambda good: b"id,text\n1,\n2,a\n", {DOCUMENTS: (1, 0, 1), ALL: (0, 2, 0)}),
    "quote_inside.csv": (lambda good: b'id,text\n1,"a"b\n2,c\n', {DOCUMENTS: (1, 1, 0), ALL: (0, 2, 0)}),
    "quote_inside.tsv": (lambda good: b'id\ttext\n1\t"a"b\n2\tc\n', {DOCUMENTS: (2, 0, 0), ALL: (0, 2, 0)}),
    "empty.parquet": (lambda good: b"", (0, 1, 0)),
    "nonsense.parquet": (lambda good: b"PAR1 nonsense PAR1", (0, 1, 0)),
    "cut.parquet": (lambda good: columns(["text"])[:-20], (0, 1, 0)),
    "other_names.parquet": (lambda good: columns(["a", "b"]), (0, 3, 0)),
    "whole.parquet": (lambda good: columns(["text"]), {DOCUMENTS: (3, 0, 0), ALL: (0, 3, 0)}),
}  # fmt: skip

NASTY_FILES = {**ENCODED, **LINES, **VALUES, **PACKED, **PLAIN, **PAGES, **ARCHIVES, **BOOKS, **TABLES}


def expected(name, kind):
    """(good, broken, left out) of a file, to a reader of this kind."""
    wanted = NASTY_FILES[name][1]
    return wanted.get(kind, wanted[ALL]) if isinstance(wanted, dict) else wanted


def written(name, folder, good):
    """The file, made in a folder."""
    path = folder / name
    path.write_bytes(NASTY_FILES[name][0](good))
    return path
