"""Values of an evaluation's flags. Imported before torch."""

TASK_NAMES = (  # keys of tasks.TASKS
    *("llava", "caption", "vqav2", "textvqa", "pope", "scienceqa", "gqa", "mmbench", "preference"),
    *("mmmu", "mmstar", "docvqa", "infovqa", "chartqa", "ai2d", "ocrbench", "mathvista", "seed", "mme", "refcoco"),
)
# Values of --metric for a LLaVA-format file.
CHOSEN_METRICS = ("exact", "vqa", "yes_no", "choice", "caption")
TURNS = ("together", "each")  # questions of a record in one conversation, or each without the earlier turns
