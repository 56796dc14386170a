"""Read data files of all common formats into records: documents, chats, prompts, preferences. Errors name the line.

docs/data.md lists the formats, and the shapes and field names of records; the shape is detected for each record. A
thought or tool calls written as text in an answer are read as such. Fields and marks that change what should be
learned, and that nothing uses, are counted in `BadRecords.ignored` and in a warning.

Everything is read lazily: memory holds one record (a JSON array is decoded value by value), never a file.
"""

from penjing.data.formats.bad_records import DEFAULT_MAX_BAD, BadRecords, NoBadRecords, UncheckedRecords
from penjing.data.formats.files import list_files
from penjing.data.formats.read import READERS, read_chats, read_documents, read_preferences, read_prompts, sniff
from penjing.data.formats.schema import CHAT_FIELDS, Chat, Document, Kind, Message, PreferenceRecord
from penjing.data.formats.write import chat_record

__all__ = [
    "CHAT_FIELDS", "DEFAULT_MAX_BAD", "READERS", "BadRecords", "Chat", "Document", "Kind", "Message", "NoBadRecords",
    "PreferenceRecord", "UncheckedRecords", "chat_record", "list_files", "read_chats", "read_documents",
    "read_preferences", "read_prompts", "sniff",
]  # fmt: skip
