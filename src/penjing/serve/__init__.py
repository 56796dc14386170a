"""A server for models: OpenAI's API, and a chat page. `penjing serve` starts it; docs/serve.md describes the API."""
