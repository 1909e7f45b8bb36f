"""What the data sources of a mixture are called where each has numbers of its own."""

from pathlib import Path


def short_names(paths: list[str]) -> list[str]:
    """A different name for each data source: its file's, with as many folders as it takes to tell them apart."""
    parts, stems = [Path(path).parts for path in paths], [Path(path).stem for path in paths]
    for depth in range(max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts] if depth else stems
        if len(set(names)) == len(names):
            return names
    # One file more than once, as different parts of it.
    return [f"{path} ({paths[: i + 1].count(path)})" if paths.count(path) > 1 else path for i, path in enumerate(paths)]


def means_by_source(sources: list[str], sums: list[float], targets: list[float]) -> dict[str, float]:
    """The mean loss per supervised token of each data source that has any, in the five digits that are looked at."""
    means = {name: total / number for name, total, number in zip(sources, sums, targets) if number}
    return {name: float(f"{mean:.5g}") for name, mean in means.items()}
