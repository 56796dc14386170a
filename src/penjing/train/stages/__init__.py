"""Stages: data, source, objective and validation of each kind of training. A new objective adds a line to the table."""

from typing import Any

from penjing.base.registry import look_up

# objective -> (its settings, its stage). The choices of `Run.objective`.
STAGES = {
    "next_token": ("penjing.objective.next_token:NextTokenSettings", "penjing.train.stages.next_token:NextTokenStage"),
    "distill": ("penjing.objective.distill:Distill", "penjing.train.stages.distill:DistillStage"),
    "distill/on_policy": ("penjing.objective.distill:Distill", "penjing.train.stages.on_policy_distill:OnPolicyStage"),
    "preference": ("penjing.objective.preference:Preference", "penjing.train.stages.preference:PreferenceStage"),
    "reward": ("penjing.objective.reward_model:RewardModel", "penjing.train.stages.reward:RewardStage"),
    "policy": ("penjing.objective.policy:Policy", "penjing.rl.stage:PolicyStage"),
}


def settings_classes() -> list[type[Any]]:
    """The settings of every objective, the default one first."""
    table = {name: settings for name, (settings, _) in STAGES.items()}
    return list(dict.fromkeys(look_up(table, name, what="objective") for name in table))


def stage_class(name: str) -> type[Any]:
    """The stage of an objective (`ObjectiveSettings.stage`)."""
    stages = {objective: stage for objective, (_, stage) in STAGES.items()}
    stage: type[Any] = look_up(stages, name, what="objective")
    return stage
