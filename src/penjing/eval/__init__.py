"""Floor 6: what a model can do, in figures with a chance level beside them."""

TASKS = {
    "questions": "penjing.eval.questions:Questions",
    "blimp": "penjing.eval.minimal_pairs:Blimp",
    "zhoblimp": "penjing.eval.minimal_pairs:ZhoBlimp",
    "ceval": "penjing.eval.exams:CEval",
    "cmmlu": "penjing.eval.exams:Cmmlu",
    "mmlu": "penjing.eval.exams:Mmlu",
    "arc_easy": "penjing.eval.multiple_choice:ArcEasy",
    "arc_challenge": "penjing.eval.multiple_choice:ArcChallenge",
    "hellaswag": "penjing.eval.multiple_choice:HellaSwag",
    "piqa": "penjing.eval.multiple_choice:Piqa",
    "openbookqa": "penjing.eval.multiple_choice:OpenBookQA",
    "winogrande": "penjing.eval.multiple_choice:WinoGrande",
    "lambada": "penjing.eval.lambada:Lambada",
    "gsm8k": "penjing.eval.grade_school_math:Gsm8k",
    "core": "penjing.eval.core:Core",
}
