"""Style sheet of pages: light and dark, narrow screens and print."""

STYLE = """
:root { color-scheme: light dark;
  --ground: #fbfaf7; --ink: #1d2329; --soft: #56606b; --line: #cfd3d8; --card: #ffffff;
  --heat: #5b9bd5; --ours: #b3303f; --choice: #1f5f99; --best: #6b7480; --link: #1a5a96; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #14181d; --ink: #e8ebee; --soft: #a7b0ba; --line: #3a424b; --card: #1b2127;
  --heat: #2f6ea5; --ours: #ff8a8a; --choice: #7db8ee; --best: #9aa5b1; --link: #8cc2f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--ground);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-top: 1px solid var(--line);
  padding-top: 1rem; }
h3 { font-size: 1rem; margin: .75rem 0 .25rem; }
p { max-width: 46rem; margin: .5rem 0; }
.first { font-size: 1.1rem; }
.soft, caption, figcaption { color: var(--soft); }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; }
nav a, summary { display: inline-block; padding: .4rem 0; }
.wide { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .25rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
thead th { white-space: normal; overflow-wrap: normal; }
th:first-child { text-align: left; }
th { font-weight: 600; }
.facts :is(td, th) { text-align: left; }
.facts td { white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
.maps { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
.map text { text-anchor: middle; }
.map a text { fill: var(--link); text-decoration: underline; }
.map rect { fill: var(--heat); stroke: var(--line); stroke-width: .5; }
details { border-bottom: 1px solid var(--line); }
summary { display: list-item; cursor: pointer; }
.heads { display: grid; gap: .75rem; padding: .5rem 0;
  grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); }
.heads figure { background: var(--card); border: 1px solid var(--line); border-radius: .4rem;
  padding: .4rem; }
.heads figcaption { font-size: .75rem; line-height: 1.3; }
polyline, .frame, .grid, .target, .lead { fill: none; }
.frame { stroke: var(--soft); stroke-width: 1.5; }
.choice { stroke: var(--choice); stroke-width: 4; }
.best { stroke: var(--best); stroke-width: 3; stroke-dasharray: 9 6; }
.far { stroke: var(--ink); stroke-width: 2.5; }
.plan { fill: var(--ours); stroke: var(--card); stroke-width: 2; }
.key svg { display: inline-block; width: 2.6rem; vertical-align: middle; }
.key span { margin-right: 1rem; white-space: nowrap; }
.chart { min-width: 40rem; max-width: 56rem; }
.chart .x { text-anchor: middle; }
.chart .y { text-anchor: end; }
.grid { stroke: var(--line); stroke-width: .6; }
.target { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 4; }
.lead { stroke: var(--line); stroke-width: .6; }
.rule polyline { stroke: var(--best); stroke-width: 1.1; }
.ours polyline { stroke: var(--ours); stroke-width: 3.2; }
.ours circle { fill: var(--ours); }
svg text.ours { font-weight: 700; fill: var(--ours); }
@media print { .wide { overflow: visible; } }
"""
