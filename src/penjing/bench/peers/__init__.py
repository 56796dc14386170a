"""Other trainers, one file each: a script that reads a spec and prints one line of JSON (bench/meter.py)."""

PEERS = {
    "dpo": {"trl": "penjing.bench.peers.trl_dpo"},
    "grpo": {"trl": "penjing.bench.peers.trl_grpo"},
}
# Its package and what to install, by a peer's name.
NEEDS = {"trl": "trl"}
