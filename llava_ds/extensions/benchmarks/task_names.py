"""Words that flags and files of an evaluation take. Read before torch is imported."""

TASK_NAMES = (  # keys of tasks.TASKS
    *("llava", "caption", "vqav2", "textvqa", "pope", "scienceqa", "gqa", "mmbench", "preference"),
    *("mmmu", "mmstar", "docvqa", "infovqa", "chartqa", "ai2d", "ocrbench", "mathvista", "seed", "mme", "refcoco"),
)
# What --metric offers for a LLaVA-format file.
CHOSEN_METRICS = ("exact", "vqa", "yes_no", "choice", "caption")
TURNS = ("together", "each")  # how the questions of a record are asked
