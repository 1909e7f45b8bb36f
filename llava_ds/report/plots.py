"""loss.png."""

from pathlib import Path


def plot_loss(rows: list[dict], path: Path, title: str) -> None:
    """Draw the loss of every step, its running mean, and the learning rate, to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    figure = Figure(figsize=(8, 4.5))
    figure.subplots_adjust(left=0.1, right=0.88, bottom=0.2, top=0.92)  # finding them out would draw it twice
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(steps, running_mean(losses), color="tab:blue", label="loss (running mean)")
    axes.set(xlabel="optimizer step", ylabel="loss per supervised token", title=title)
    axes.set_yscale("log")
    rate = axes.twinx()
    rate.plot(steps, [max(row["lr"]) for row in rows], color="tab:grey", linestyle=":", label="learning rate")
    rate.set_ylabel("learning rate")
    figure.legend(loc="lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)


def running_mean(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential running mean without the bias of its start."""
    means, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        means.append(total / norm)
    return means
