"""Floor 6: stages. A recipe is the list of what it changes; `penjing train NAME` runs one."""

RECIPES = {
    "pretrain": "penjing.recipes.pretrain:pretrain",
    "ladder": "penjing.recipes.ladder:ladder",
    "sft": "penjing.recipes.sft:sft",
    "lora": "penjing.recipes.lora:lora",
    "tiny": "penjing.recipes.quickstart_configs:tiny",
    "tiny_sft": "penjing.recipes.quickstart_configs:tiny_sft",
    "tiny_distill": "penjing.recipes.quickstart_configs:tiny_distill",
    "distill": "penjing.recipes.distill:distill",
    "dpo": "penjing.recipes.dpo:dpo",
    "reward": "penjing.recipes.reward:reward",
    "grpo": "penjing.recipes.grpo:grpo",
    "ppo": "penjing.recipes.ppo:ppo",
}
# What brings data and objective, by `objective.kind`.
STAGES = {
    "next_token": "penjing.train.stages.next_token:NextTokenStage",
    "distill": "penjing.recipes.distill:make_stage",
    "preference": "penjing.recipes.dpo:make_stage",
    "reward": "penjing.train.stages.reward:RewardStage",
    "policy": "penjing.rl.stage:PolicyStage",
}
WITH_DIAL = ("ladder",)  # ladder:30m
