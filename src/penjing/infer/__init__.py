"""Floor 4: a trained model writes; one engine for chat, evaluation, rollouts and the server.

Where to begin: generate.py (prompts in, text out), engine.py (what a step is), scheduler.py and slots.py (whose turn it
is, and what is kept), sampler.py and sample.py (how a token is drawn), forward.py (what a model is to the engine).
"""
