"""The style sheet of the pages, light and dark, phone, desktop and paper; and the same colours for pictures."""

import re

COLOURS = {
    "paper": ("#ffffff", "#0f1216"),
    "panel": ("#f7f8fa", "#171b21"),
    "ink": ("#1b1f24", "#e6e9ed"),
    "soft": ("#57606a", "#a3acb7"),
    "rule": ("#d8dee4", "#313842"),
    "mark": ("#d3e4ff", "#1d3f73"),
    "c0": ("#1f6feb", "#6aa5ff"),
    "c1": ("#c4460b", "#ff9355"),
    "c2": ("#7b8490", "#8f98a3"),
    "c3": ("#1a7f37", "#57c46f"),
    "c4": ("#8250df", "#b692ff"),
    "c5": ("#0b7a8a", "#3ec2d4"),
    "c6": ("#bf3989", "#ff80c0"),
    "c7": ("#8a6300", "#d9b23c"),
}
"""Of light pages and of dark ones."""
LIGHT, DARK = ({name: pair[place] for name, pair in COLOURS.items()} for place in (0, 1))
NUM_COLOURS = sum(name[1:].isdigit() for name in LIGHT)
SHAPES = """
svg text { fill: var(--soft); font-family: system-ui, sans-serif; font-size: 12px; }
svg text.name { fill: var(--ink); font-size: 13px; }
svg text.title { fill: var(--ink); font-size: 15px; font-weight: 600; }
.axis { stroke: var(--soft); }
.grid { stroke: var(--rule); stroke-width: .75; }
.guide { fill: none; stroke: var(--soft); stroke-dasharray: 4 4; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
""" + "".join(
    f".line.c{n} {{ stroke: var(--c{n}); }} .bar.c{n}, .dot.c{n} {{ fill: var(--c{n}); }} "
    f"i.c{n} {{ background: var(--c{n}); }}\n"
    for n in range(NUM_COLOURS)
)
"""What the shapes of a chart look like."""


def _declared(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


FONTS = ("DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica")
"""By name, for programs that do not know which font is the system's."""
PICTURE_STYLE = re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], SHAPES).replace("system-ui", ", ".join(FONTS))
"""``SHAPES`` in the light colours, for programs that know no variables."""
STYLE = (
    f"""
:root {{ {_declared(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_declared(DARK)} }} }}
{SHAPES}"""
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 920px; margin: 0 auto; padding: 32px 16px 64px; }
main.wide { max-width: 1600px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 48px 0 12px; padding-top: 12px; border-top: 1px solid var(--rule); }
h3 { font-size: .95rem; font-weight: 600; margin: 0 0 10px; overflow-wrap: anywhere; }
header p { font-size: 1.05rem; margin: 0 0 6px; max-width: 75ch; overflow-wrap: anywhere; }
.note, .missing { color: var(--soft); font-size: .875rem; max-width: 80ch; margin: 10px 0 0; overflow-wrap: anywhere; }
.runs { display: grid; gap: 24px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.run { min-width: 0; }
.cards { display: flex; flex-wrap: wrap; gap: 8px 40px; margin: 16px 0 0; padding: 0; list-style: none; }
.cards small { display: block; }
.cards b { display: block; font-size: 2.4rem; line-height: 1.15; font-weight: 650; color: var(--c0); }
.cards b, table { font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; background:
  linear-gradient(to left, var(--paper) 50%, transparent) right / 32px 100% no-repeat local,
  linear-gradient(to left, var(--rule), transparent) right / 10px 100% no-repeat; }
.scroll + .scroll, .charts + *, .scroll + .charts { margin-top: 16px; }
table { border-collapse: collapse; width: 100%; }
caption { text-align: left; font-weight: 600; font-size: .95rem; padding: 4px 0; overflow-wrap: anywhere; }
th, td { padding: 7px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; font-size: .875rem; white-space: normal; vertical-align: bottom; }
tbody th { text-align: left; font-weight: 500; white-space: normal; overflow-wrap: anywhere; min-width: 7.4em; }
tbody th[colspan] { color: var(--soft); font-size: .875rem; padding-top: 14px; }
@media (max-width: 600px) { th, td { padding: 6px 3px; font-size: .82rem; } thead th { font-size: .75rem; } }
small { color: var(--soft); font-size: .8rem; }
td small { margin-left: .5em; }
@media (max-width: 600px) { td small { display: block; margin: 0; } }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; }
figure { min-width: 0; max-width: 480px; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: 6px; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 0; padding: 0; }
.legend { font-size: .85rem; }
i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .45em; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: 12px; margin: 0;
  font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: var(--mark); color: inherit; border-radius: 3px; }
dl { display: grid; grid-template-columns: minmax(90px, max-content) 1fr; gap: 6px 16px; margin: 0; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
@media print {
  main { max-width: none; padding: 0; }
  figure, pre, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  mark, i { print-color-adjust: exact; }
}
"""
)
