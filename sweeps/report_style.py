"""The report's style sheet: one column of text, figures side by side where there is room, dark where the reader is."""

STYLE = """
:root { color-scheme: light dark; --ink: #22252a; --quiet: #5d636d; --page: #f7f7f5; --ground: #ffffff;
  --grid: #e3e4e8;
  --line: #d9dbe0; --good: #17643a; --goodbg: #e5f3ea; --warn: #7a5200; --warnbg: #fbf1da; --bad: #9d2418;
  --badbg: #fbe7e4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --quiet: #a2a9b4; --page: #14161a; --ground: #1c1f25;
  --grid: #343841; --line: #343841; --good: #7fd6a0; --goodbg: #16301f; --warn: #f0c469; --warnbg: #33290f;
  --bad: #ff9d8f;
  --badbg: #3a1713; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, sans-serif; }
main { max-width: 78rem; margin: 0 auto; padding: 1.2rem clamp(0.8rem, 3vw, 2.2rem) 4rem; }
h1 { font-size: clamp(1.35rem, 4vw, 1.9rem); line-height: 1.2; margin: 0.6rem 0 0.2rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 0.4rem; }
p, ul { max-width: 66rem; } .quiet { color: var(--quiet); font-size: 0.92rem; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin: 0.8rem 0; font-size: 0.92rem; }
  a { color: inherit; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); gap: 0.8rem; margin: 1rem 0; }
.tile, figure, .box { background: var(--ground); border: 1px solid var(--line); border-radius: 10px;
  padding: 0.8rem 1rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.25; } .tile span { color: var(--quiet);
  font-size: 0.86rem; }
.box { margin: 0.8rem 0; } .box p { margin: 0.2rem 0; } .box ul { margin: 0.3rem 0; padding-left: 1.2rem; }
.good { background: var(--goodbg); border-color: transparent; } .good > p:first-child { color: var(--good); }
.warn { background: var(--warnbg); border-color: transparent; } .warn > p:first-child { color: var(--warn); }
.bad { background: var(--badbg); border-color: transparent; } .bad > p:first-child { color: var(--bad); }
.inside { color: var(--good); } .outside { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem;
  margin: 1rem 0; }
figure { margin: 0; padding: 0.6rem 0.6rem 0.8rem; max-width: 42rem; } figure svg, figure img { width: 100%;
  height: auto; display: block; }
figure img { background: #fff; border-radius: 6px; }
figcaption { color: var(--quiet); font-size: 0.9rem; padding: 0.3rem 0.4rem 0; }
.scroll { overflow-x: auto; background: var(--ground); border: 1px solid var(--line); border-radius: 10px;
  margin: 0.8rem 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.42rem 0.8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--quiet); font-weight: 600; white-space: nowrap; } tbody th { font-weight: 600; }
.numbers td { white-space: nowrap; } tbody tr:last-child > * { border-bottom: 0; }
pre { background: var(--ground); border: 1px solid var(--line); border-radius: 10px; padding: 0.8rem 1rem;
  overflow-x: auto;
  font-size: 13px; line-height: 1.45; }
details { margin: 0.8rem 0; } summary { cursor: pointer; font-weight: 600; }
"""
