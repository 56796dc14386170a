"""Recipes: functions that return settings; `penjing train NAME` runs one."""

RECIPES = {
    "pretrain": "penjing.recipes.pretrain:pretrain",
    "babylm": "penjing.recipes.babylm:babylm",
    "sft": "penjing.recipes.sft:sft",
    "lora": "penjing.recipes.sft:lora",
    "tiny": "penjing.recipes.quickstart_configs:tiny",
    "tiny_sft": "penjing.recipes.quickstart_configs:tiny_sft",
    "tiny_distill": "penjing.recipes.quickstart_configs:tiny_distill",
    "distill": "penjing.recipes.distill:distill",
    "dpo": "penjing.recipes.dpo:dpo",
    "reward": "penjing.recipes.dpo:reward",
    "grpo": "penjing.recipes.grpo:grpo",
    "ppo": "penjing.recipes.grpo:ppo",
}
