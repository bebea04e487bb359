"""Draws what device_trace.py reads: a step's time by parts as a picture, every kernel of a step as a page."""

from html import escape
from string import Template

from tools.benchmark.device_trace import GAPS, ROWS

# Each part of the model has a hue: pale for forward, full for backward, between them for recomputation.
BLUES = ("#7fa6e3", "#2f62c4", "#5581d4")  # decoder layers
GREENS = ("#8fbf77", "#38761d", "#629c45")  # embedding
ORANGES = ("#eda65a", "#b8620f", "#d98430")  # head and loss
# optimizer and clipping, outside, communication, waiting for others, gaps
OTHERS = ("#8e63b0", "#8a949e", "#cc3d3d", "#e8a9a9", "#e8ebee")
COLORS = dict(zip(ROWS, [*BLUES, *GREENS, *ORANGES, *OTHERS], strict=True))


def draw(accounts, path):
    """Writes a bar for each of {name: account} to an .svg or .png file, from 0 to the ms of a step.

    Raises ModuleNotFoundError with a remedy where there is no matplotlib.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("a picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    # the same file from the same numbers: no date, and names that do not change
    matplotlib.rcParams |= {"svg.hashsalt": "paddle_te", "axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot

    names, left = list(accounts)[::-1], [0.0] * len(accounts)
    figure, axis = pyplot.subplots(figsize=(10, 0.6 * len(names) + 2), layout="constrained")
    longest = max(account["total_ms"] for account in accounts.values())
    for row in ROWS:
        values = [accounts[name]["ms"].get(row, 0.0) for name in names]
        if not any(values):
            continue
        bars = axis.barh(names, values, left=left, color=COLORS[row], label=row)
        # numbers where there is room for them
        labels = [f"{value:.3g}" if value > 0.03 * longest else "" for value in values]
        axis.bar_label(bars, labels, label_type="center", color="black" if row == GAPS else "white")
        left = [start + value for start, value in zip(left, values, strict=True)]
    axis.set_xlabel("ms of a step")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Where a training step's time goes</title>
<style>
body { font: 14px sans-serif; margin: 24px; color: #222; }
table { border-collapse: collapse; margin: 12px 0; }
td, th { padding: 2px 12px 2px 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
.scroll { overflow-x: auto; border: 1px solid #ccd; padding: 8px 0; }
.scroll svg { display: block; width: 100%; height: 130px; }
rect:hover { stroke: #000; stroke-width: 1; vector-effect: non-scaling-stroke; }
</style>
</head>
<body>
<h1>Where a training step's time goes</h1>
<p>The first counted step of each trace. Rest the mouse on a block for the kernel's name, part and time, or choose a
wider view and scroll. Upper lane: kernels that compute, copy or clear memory. Lower lane: communication.</p>
$traces
</body>
</html>
""")
TRACE = Template("""<h2>$name</h2>
<p>$kernels kernels in $ms ms.
<label>Width <input type="range" min="1" max="60" value="1"
 oninput="this.closest('p').nextElementSibling.firstElementChild.style.width = this.value * 100 + '%'"></label></p>
<div class="scroll"><svg viewBox="0 0 $width 130" preserveAspectRatio="none">
$blocks
</svg></div>
<table><tr><th>part</th><th>ms of a step</th><th>share</th></tr>
$rows
</table>
""")
LONGEST_NAME = 200  # of C++ templates there are names of thousands of letters
LANES = {False: (10, 60), True: (80, 40)}  # y and height, by whether it communicates


def page(profiles):
    """HTML text of {name: Profile}, complete in itself: a browser asks no other site for anything."""
    return PAGE.substitute(traces="\n".join(_trace(name, profile) for name, profile in profiles.items()))


def _trace(name, profile):
    account, steps = profile.account(), map(profile.step, range(len(profile.starts)))
    works = next(step for step in steps if step)
    begin, end = works[0].start, max(work.end for work in works)
    rows = [
        f'<tr><td><span class="key" style="background:{COLORS[row]}"></span>{escape(row)}</td>'
        f'<td class="number">{ms:.2f}</td><td class="number">{ms / account["total_ms"]:.1%}</td></tr>'
        for row, ms in account["ms"].items()
    ]
    return TRACE.substitute(
        name=escape(name),
        kernels=sum(not work.waits for work in works),
        ms=f"{(end - begin) / 1e3:.2f}",
        width=f"{end - begin:.3f}",
        blocks="\n".join(_block(work, begin) for work in works),
        rows="\n".join(rows),
    )


def _block(work, begin):
    y, height = LANES[work.communicates]
    part = work.part
    if work.communicates:
        part = f"{'waiting' if work.waits else 'communication'}, launched in {part}"
    times = f"{work.end - work.start:.1f} µs, from {(work.start - begin) / 1e3:.3f} ms on"
    words = "\n".join([work.name[:LONGEST_NAME], part, times])
    return (
        f'<rect x="{work.start - begin:.3f}" y="{y}" width="{work.end - work.start:.3f}" height="{height}" '
        f'fill="{COLORS[work.row]}"><title>{escape(words)}</title></rect>'
    )
