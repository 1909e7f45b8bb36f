"""metrics.jsonl: one object per optimizer step."""

import json
from pathlib import Path


class MetricsLog:
    """Appends steps to a JSONL file. Steps behind the one a run resumes from are dropped, for they will come again."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        kept = [row for row in read_metrics(path) if row["step"] <= resume_step] if path.exists() else []
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def write(self, rows: list[dict]) -> None:
        """Append rows, in one write, so that a killed run leaves whole lines."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(path: Path) -> list[dict]:
    """All whole rows of a JSONL file of this package; a last line that a kill cut short is passed over."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
