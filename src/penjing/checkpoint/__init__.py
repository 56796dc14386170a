"""Floor 3: checkpoints. Written atomically, hashed, and free of code: safetensors and JSON only."""
