"""Other trainers, one file each: a script that reads a spec and prints one line of JSON (bench/meter.py)."""

PEERS = {
    "dpo": {"trl": "penjing.bench.peers.trl_dpo"},
    "grpo": {"trl": "penjing.bench.peers.trl_grpo"},
}
PRETRAIN = {
    "trainer": "penjing.bench.peers.hf_trainer",
    "trainer-packed": "penjing.bench.peers.hf_trainer packed",
    "litgpt": "penjing.bench.peers.litgpt",
    "minimind-style": "penjing.bench.peers.minimind_style",
}
# Its packages and what to install, by a peer's name.
NEEDS = {
    "trl": "trl",
    "trainer": "accelerate",
    "trainer-packed": "accelerate",
    "litgpt": "litgpt litdata",
    "minimind-style": "transformers",
}
