"""The style sheet of the report: light and dark, phone and desktop."""

STYLE = """
:root {
  --paper: #ffffff; --panel: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --rule: #d8dee4; --mark: #d6e6ff;
  --c0: #1a7f37; --c1: #6e7781; --c2: #1f6feb; --c3: #c4460b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0f1216; --panel: #171b21; --ink: #e6e9ed; --soft: #a3acb7; --rule: #313842; --mark: #1d3f73;
    --c0: #57c46f; --c1: #98a1ab; --c2: #6aa5ff; --c3: #ff9355;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 8px; }
h2 { font-size: 1.15rem; margin: 40px 0 12px; }
header p { font-size: 1.05rem; margin: 0; max-width: 70ch; }
.note { color: var(--soft); font-size: .875rem; max-width: 80ch; margin: 10px 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 8px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; font-size: .875rem; white-space: normal; }
@media (max-width: 600px) { th, td { padding: 6px 5px; font-size: .85rem; } tbody th { white-space: normal; } }
tbody th { text-align: left; font-weight: 500; position: sticky; left: 0; background: var(--paper); }
small { color: var(--soft); font-size: .8rem; display: block; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg text.name { fill: var(--ink); font-size: 13px; }
.axis { stroke: var(--soft); }
.grid { stroke: var(--rule); stroke-width: .75; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.bar, .dot { fill: var(--c); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 0; padding: 0; }
.legend { font-size: .85rem; }
i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .45em; background: var(--c); }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: 12px; margin: 0;
  font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre s { color: var(--soft); text-decoration: none; }
mark { background: var(--mark); color: inherit; border-radius: 3px; }
dl { display: grid; grid-template-columns: minmax(90px, max-content) 1fr; gap: 6px 16px; margin: 0; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
"""
