"""Floor 4: inference. One engine serves chat, evaluation, rollouts and the server.

Read first: generate.py (prompts in, ids out), engine.py (one step), scheduler.py and slots.py (scheduling, prefix
caching), sampler.py and sample.py (sampling), forward.py (the model's interface to the engine).
"""
