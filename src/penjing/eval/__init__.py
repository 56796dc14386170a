"""Floor 6: what a model can do, in figures with a chance level beside them."""

TASKS = {
    "questions": "penjing.eval.questions:Questions",
}
