"""Rewards: a class built from (RewardSettings, RewardRuntime) that scores each answer."""

REWARDS = {
    "exact": "penjing.rl.rewards.reference_answer:Exact",
    "numeric": "penjing.rl.rewards.reference_answer:Numeric",
    "regex": "penjing.rl.rewards.answer_form:Regex",
    "format": "penjing.rl.rewards.answer_form:Format",
    "length": "penjing.rl.rewards.answer_form:Length",
    "repetition": "penjing.rl.rewards.answer_form:Repetition",
    "code": "penjing.rl.rewards.code:Code",
    "model": "penjing.rl.rewards.model:ModelReward",
    "tools": "penjing.rl.rewards.answer_form:Tools",
    "judge": "penjing.rl.rewards.judge:Judge",
}
