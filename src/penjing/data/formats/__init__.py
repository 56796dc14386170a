"""From any file people have to records: documents to read, chats to answer, and line-exact errors.

Files (each also as `.gz`, except parquet): `.txt` `.md` (cut into documents), `.py` (one document), `.jsonl`, `.json`
(an array, lines, or one object), `.csv` `.tsv` (first row names the columns) and `.parquet`. In a `.tsv` a quotation
mark is a character like any other, but around a whole field.

A document record has its text in `text`, else `content`, else `raw_content`; the text is handed over unchanged.
A chat record may have any of these shapes, told apart record by record:

- MiniMind   {"conversations": [{"role", "content", "reasoning_content"?, "tools"?, "tool_calls"?}]}
- OpenAI     {"messages": [{"role", "content", "tool_calls"?}], "tools"?}
- ShareGPT   {"conversations": [{"from": "human|gpt|system|function_call|observation", "value"}], "system"?, "tools"?}
- Firefly    {"conversation": [{"human", "assistant"}]}
- Alpaca     {"instruction", "input"?, "output", "system"?, "history"?}; with `en_` and `zh_` fields it is two chats
- plain      {"prompt" | "question", "response" | "answer" | "completion" | "std_answer", "system"?}

A thought that an assistant's words begin with, as <think>...</think>, is read as its `reasoning_content`.

A prompt is such a record without its last answer, or with one that is not looked at.

A record of preferences is a pair or one judged answer; where an answer is a list of messages it may hold the prompt:

- pair       {"chosen": [messages], "rejected": [messages]}, or answers of text or of one message to what "prompt" (text
             or messages), a field of messages or Alpaca's fields ask
- judged     {"prompt", "completion", "label": true | false}; Alpaca, or a chat in any field of messages, with "label"
             (or "kto_tag")

Everything is read lazily: memory holds one record (a JSON array is decoded value by value), never a file.
"""

from penjing.data.formats.bad_records import DEFAULT_MAX_BAD, BadRecords, NoBadRecords
from penjing.data.formats.files import list_files
from penjing.data.formats.read import read_chats, read_documents, read_preferences, read_prompts, sniff
from penjing.data.formats.schema import CHAT_FIELDS, Chat, Document, Kind, Message, PreferenceRecord
from penjing.data.formats.write import chat_record

__all__ = [
    "CHAT_FIELDS",
    "DEFAULT_MAX_BAD",
    "BadRecords",
    "Chat",
    "Document",
    "Kind",
    "Message",
    "NoBadRecords",
    "PreferenceRecord",
    "chat_record",
    "list_files",
    "read_chats",
    "read_documents",
    "read_preferences",
    "read_prompts",
    "sniff",
]
