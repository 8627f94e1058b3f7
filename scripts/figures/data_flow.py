"""The picture of docs/architecture.md: from a model to a compiled program, and what one step does on each device.

    python scripts/figures/data_flow.py        # writes docs/images/data_flow.svg

No library draws it: boxes and arrows are placed by hand on a grid of five columns.
"""

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 988, 604
COLORS = {"input": "#eef2f6", "package": "#dcebf9", "program": "#fdeccb", "stored": "#dcebf9", "used": "#fdeccb",
          "device": "#eef2f6"}
BOX_W, BOX_H = 168, 74


def box(x, y, title, lines, kind, *, width=BOX_W, height=BOX_H):
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{COLORS[kind]}" stroke="#5b6b7b"/>',
             f'<text x="{x + width / 2}" y="{y + 22}" class="title">{escape(title)}</text>']
    parts += [f'<text x="{x + width / 2}" y="{y + 41 + 16 * i}" class="line">{escape(line)}</text>'
              for i, line in enumerate(lines)]
    return "\n".join(parts)


def arrow(points, label="", *, at=None, anchor="middle", dashed=False):
    path = " ".join(f"{x},{y}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="#33404d" stroke-width="1.4" '
             f'marker-end="url(#head)"{dash}/>']
    if label:
        x, y = at
        parts += [f'<text x="{x}" y="{y + 14 * i}" class="label" text-anchor="{anchor}">{escape(line)}</text>'
                  for i, line in enumerate(label.split("\n"))]
    return "\n".join(parts)


def before_the_first_step():
    xs, y = [24 + i * 193 for i in range(5)], 64
    boxes = [
        box(xs[0], y, "Flax model, batch", ["shapes only", "(nothing is computed)"], "input"),
        box(xs[1], y, "frontends/", ["pure functions; hooks", "where a param is read"], "package"),
        box(xs[2], y, "sharding/", ["layout: a spec, padding", "for every leaf"], "package"),
        box(xs[3], y, "step/", ["forward, backward,", "update, as one jaxpr"], "package"),
        box(xs[4], y, "transforms/", ["passes: remat, dtype,", "scatter of gradients"], "package"),
    ]
    arrows = [arrow([(xs[i] + BOX_W, y + 37), (xs[i + 1] - 3, y + 37)]) for i in range(4)]
    low = 186
    boxes += [
        box(xs[4], low, "XLA", ["for live devices, or", "a target topology"], "input"),
        box(xs[3], low, "compiled program", ["text, memory,", "collectives"], "program"),
        box(xs[2], low, "xla/, contract", ["what it sends, against", "what the stage allows"], "package"),
        box(xs[1], low, "planning/", ["does it fit, why,", "how long"], "package"),
        box(xs[0], low, "cli/", ["train, inspect, plan,", "export, launch"], "package"),
    ]
    arrows += [arrow([(xs[4] + BOX_W / 2, y + BOX_H), (xs[4] + BOX_W / 2, low - 3)])]
    arrows += [arrow([(xs[i], low + 37), (xs[i - 1] + BOX_W + 3, low + 37)]) for i in (4, 3, 2, 1)]
    return ['<text x="24" y="36" class="heading">Before the first step: from shapes to a checked program</text>',
            *boxes, *arrows]


def each_step():
    xs, y = [24 + i * 193 for i in range(5)], 366
    low = 508
    boxes = [
        box(xs[0], y, "stored parameters", ["fp32, 1/N of each", "(stages 1, 2: bf16, whole)"], "stored"),
        box(xs[1], y, "weights of one layer", ["all-gathered in bf16,", "dropped after use"], "used"),
        box(xs[2], y, "forward", ["loss over the", "global batch"], "device"),
        box(xs[3], y, "backward", ["layers in reverse; with", "remat recomputed"], "device"),
        box(xs[4], y, "gradient of one layer", ["this device's sum over", "its part of the batch"], "used"),
        box(xs[4], low, "gradient shard", ["1/N, summed over", "all devices"], "used"),
        box(xs[2], low, "optimizer", ["any optax transform,", "on 1/N of each leaf"], "device"),
        box(xs[0], low, "optimizer states", ["fp32, 1/N", "of each leaf"], "stored"),
    ]
    mid = y + 37
    arrows = [
        arrow([(xs[0] + BOX_W, mid), (xs[1] - 3, mid)]),
        arrow([(xs[1] + BOX_W, mid), (xs[2] - 3, mid)]),
        arrow([(xs[2] + BOX_W, mid), (xs[3] - 3, mid)]),
        arrow([(xs[3] + BOX_W, mid), (xs[4] - 3, mid)]),
        arrow([(xs[0] + BOX_W / 2, y), (xs[0] + BOX_W / 2, y - 22), (xs[3] + BOX_W / 2, y - 22),
               (xs[3] + BOX_W / 2, y - 3)],
              "stage 3: all-gathered once more for backward",
              at=(xs[2] - 10, y - 28), dashed=True),
        arrow([(xs[4] + BOX_W / 2, y + BOX_H), (xs[4] + BOX_W / 2, low - 3)], "reduce-scatter",
              at=(xs[4] + BOX_W / 2 - 8, (y + BOX_H + low) / 2 + 4), anchor="end"),
        arrow([(xs[4], low + 37), (xs[2] + BOX_W + 3, low + 37)]),
        arrow([(xs[0] + BOX_W, low + 28), (xs[2] - 3, low + 28)]),
        arrow([(xs[2], low + 50), (xs[0] + BOX_W + 3, low + 50)]),
        arrow([(xs[2] + 30, low), (xs[2] + 30, low - 30), (xs[0] + BOX_W / 2, low - 30),
               (xs[0] + BOX_W / 2, y + BOX_H + 3)],
              "new parameters (stages 1 and 2: all-gathered in bf16)", at=(xs[1] + BOX_W / 2 + 6, low - 36)),
    ]
    return ['<text x="24" y="312" class="heading">Each step, on each of N devices</text>', *boxes, *arrows]


def svg():
    style = ("text{font-family:Helvetica,Arial,sans-serif;fill:#1c2630} .title{font-size:14px;font-weight:bold;"
             "text-anchor:middle} .line{font-size:12.5px;text-anchor:middle} .label{font-size:12px;fill:#33404d} "
             ".heading{font-size:16px;font-weight:bold}")
    head = ('<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="#33404d"/></marker></defs>')
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'role="img" aria-label="Data flow of zero_jax">', f"<style>{style}</style>", head,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *before_the_first_step(), *each_step(),
        "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/data_flow.svg"))
    args = parser.parse_args()
    args.out.write_text(svg())
    print(args.out)


if __name__ == "__main__":
    main()
