"""Rewards, one file each: a class built from (RewardSettings, RewardRuntime) that scores each answer."""

REWARDS = {
    "exact": "penjing.rl.rewards.exact:Exact",
    "numeric": "penjing.rl.rewards.numeric:Numeric",
    "regex": "penjing.rl.rewards.regex:Regex",
    "format": "penjing.rl.rewards.format:Format",
    "length": "penjing.rl.rewards.length:Length",
    "repetition": "penjing.rl.rewards.repetition:Repetition",
    "code": "penjing.rl.rewards.code:Code",
    "model": "penjing.rl.rewards.model:ModelReward",
    "tools": "penjing.rl.rewards.tools:Tools",
    "judge": "penjing.rl.rewards.judge:Judge",
}
