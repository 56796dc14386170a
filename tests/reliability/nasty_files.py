"""Files as they come from disks, downloads, editors and spreadsheets, none of them quite right, for every reader.

name -> (what makes its bytes of one good line of the reader's kind, what reading it gives). The latter is (good,
broken, left out), by reader where it depends on that: only documents are read from plain text, and only they are in
the tables here.
"""

import gzip
import io

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
    # A line end of UTF-16 is cut in two by the byte 10: what is left of the last one is a line too.
    "utf16.jsonl": (in_utf("utf-16"), (0, 51, 0)),
    "utf16_little.jsonl": (in_utf("utf-16-le"), (0, 51, 0)),
    "utf16_big.jsonl": (in_utf("utf-16-be"), (0, 50, 0)),
    "utf32.jsonl": (in_utf("utf-32"), (0, 51, 0)),
    "bom_alone.jsonl": (lambda good: b"\xef\xbb\xbf", (0, 1, 0)),
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
    "empty.jsonl": (lambda good: b"", (0, 1, 0)),
    "blank.jsonl": (lambda good: b"\n \n\t\n", (0, 1, 0)),
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
    "empty.json": (lambda good: b"", (0, 1, 0)),
    "nothing.json": (lambda good: b"[]", (0, 1, 0)),
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
    "utf16.json": (lambda good: (b"[" + good + b"]").decode().encode("utf-16"), (0, 1, 0)),
    "zeros.json": (lambda good: bytes(1000), (0, 1, 0)),
    "nothing_between.json": (lambda good: good + good, (2, 0, 0)),
    "lines.json": (lambda good: lines(good, b"{broken", good), (2, 1, 0)),
    "single_quotes.json": (lambda good: b"[{'text': 'a'}]", (0, 1, 0)),
}

PACKED = {
    "empty.jsonl.gz": (lambda good: b"", (0, 1, 0)),
    "of_nothing.jsonl.gz": (lambda good: packed(b""), (0, 1, 0)),
    "not.jsonl.gz": (lambda good: lines(good), (0, 1, 0)),
    "cut_head.jsonl.gz": (lambda good: packed(lines(good))[:8], (0, 1, 0)),
    "text_after.jsonl.gz": (lambda good: packed(lines(*[good] * 5)) + b"rubbish after it", (5, 1, 0)),
    "zeros_after.jsonl.gz": (lambda good: packed(lines(*[good] * 5)) + bytes(512), (5, 0, 0)),
    "wrong_sum.jsonl.gz": (lambda good: packed(lines(*[good] * 500))[:-8] + bytes(8), (500, 1, 0)),
    "no_sum.jsonl.gz": (lambda good: packed(lines(*[good] * 500))[:-8], (500, 1, 0)),
    "two_members.jsonl.gz": (lambda good: packed(lines(good)) + packed(lines(good)), (2, 0, 0)),
    "a_line_in_two_members.jsonl.gz": (lambda good: packed(good[:9]) + packed(good[9:]), (1, 0, 0)),
}  # fmt: skip

PLAIN = {
    # Plain text of other kinds than documents is one broken record: the file.
    name: (lambda good, raw=raw: raw, (0, 1, 0))
    for name, raw in {
        "empty.txt": b"",
        "blank.txt": b"\n \n\n",
        "zeros.txt": bytes(3000),
        "gbk.txt": ("话说天下大势，分久必合，合久必分。\n" * 50).encode("gbk"),
        "big5.txt": ("他說這是我們的國家，不在這裡了。\n" * 50).encode("big5"),
        "utf16.txt": ("a line\n" * 50).encode("utf-16"),
        "all_bytes.txt": bytes(range(256)) * 40,
        "latin1.py": b"# caf\xe9\nprint(1)\n",
    }.items()
}

TABLES = {
    "names_only.csv": (lambda good: b"text\n", (0, 1, 0)),
    "other_names.csv": (lambda good: b"a,b\n1,2\n3,4\n", (0, 2, 0)),
    "semicolons.csv": (lambda good: b"id;text\n1;a\n2;b\n", (0, 2, 0)),
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

NASTY_FILES = {**ENCODED, **LINES, **VALUES, **PACKED, **PLAIN, **TABLES}


def expected(name, kind):
    """(good, broken, left out) of a file, to a reader of this kind."""
    wanted = NASTY_FILES[name][1]
    return wanted.get(kind, wanted[ALL]) if isinstance(wanted, dict) else wanted


def written(name, folder, good):
    """The file, made in a folder."""
    path = folder / name
    path.write_bytes(NASTY_FILES[name][0](good))
    return path
