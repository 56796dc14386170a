"""Floor 1: data. Records, tokenizer, chat, shards and packing; numpy only, no torch."""
