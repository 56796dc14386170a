"""Floor 6: stages. A recipe is the list of what it changes; `penjing train NAME` runs one."""

RECIPES = {
    "pretrain": "penjing.recipes.pretrain:pretrain",
    "sft": "penjing.recipes.sft:sft",
    "tiny": "penjing.recipes.tiny:tiny",
    "tiny_sft": "penjing.recipes.tiny:tiny_sft",
}
