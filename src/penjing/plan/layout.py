"""How the ranks of a run share a step, as a plan sees it: the strategy's name and what it shards."""

from dataclasses import dataclass

STATE_BYTES = {"weights": 4.0, "gradients": 4.0, "optimizer state": 8.0}  # per parameter, float32 and AdamW
NODE_RANKS = 8  # devices of one machine, where the plan is not told
NETWORK_SHARE = 0.4  # of the rate within a machine that the network between machines reaches: an estimate


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`ranks` devices in `nodes` machines. shards: what a rank holds a part of (`STATE_BYTES` has the names)."""

    strategy: str = "single"
    ranks: int = 1
    nodes: int = 1
    shards: frozenset[str] = frozenset()
    reshard: str = "pass"  # as `parallel.reshard`
    within_node: bool = False  # a machine holds everything, and its ranks share it
    network_bytes_per_second: float = 0.0  # of a machine; 0 = NETWORK_SHARE

    @property
    def keeps_whole(self) -> bool:
        """Whether gathered weights and whole gradients stay until a step ends."""
        return self.reshard == "step" and "gradients" in self.shards

    @property
    def group(self) -> int:
        """Ranks that hold everything together; 1: each does."""
        if not self.shards:
            return 1
        if self.within_node:
            return max(1, self.ranks // (self.nodes if self.nodes > 1 else 2))  # on one machine, two groups
        return self.ranks

    def parts(self, component: str) -> int:
        """The number of parts of a component, of which a rank holds one."""
        return self.group if component in self.shards else 1

    def network(self, bus_bytes_per_second: float) -> float:
        """Bytes per second between machines, from the rate within one."""
        return self.network_bytes_per_second or NETWORK_SHARE * bus_bytes_per_second


ONE_RANK = Layout()
