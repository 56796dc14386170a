"""Floor 3: checkpoints. Whole or not there, hashed, and never code: safetensors and JSON only."""
