"""Chat templates: conversations as tokens, and back."""
