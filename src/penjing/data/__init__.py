"""Floor 1: text. Records, tokenizer, chat, shards and packing; numpy only, no torch."""
