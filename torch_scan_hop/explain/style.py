"""The looks of the page, and its one interaction: an operator shows what it reads and feeds."""

CSS = """
.tsh { --bg:#fff; --fg:#1c2430; --soft:#5b6675; --line:#d8dee6; --panel:#f6f8fa;
  --invariant:#2e7d4f; --invariant-bg:#e3f4ea; --xs:#1f5fbf; --xs-bg:#e3edfb;
  --carry:#a85408; --carry-bg:#fdeedd;
  color:var(--fg); background:var(--bg); font:14px/1.45 system-ui,sans-serif; padding:20px 24px; }
@media (prefers-color-scheme: dark) { .tsh { --bg:#12161c; --fg:#e4e9f0; --soft:#98a4b3;
  --line:#333c48; --panel:#1a2029; --invariant:#6fcf97; --invariant-bg:#15301f; --xs:#7fb0ff;
  --xs-bg:#14253f; --carry:#f0a860; --carry-bg:#3a2610; } }
.tsh h1 { font-size:20px; margin:0 0 4px; } .tsh h2 { font-size:17px; margin:26px 0 6px; }
.tsh h3 { font-size:15px; margin:20px 0 6px; } .tsh p { margin:4px 0; }
.tsh code, .tsh td.code { font-family:ui-monospace,monospace; font-size:12.5px; }
.tsh .soft { color:var(--soft); }
.tsh table { border-collapse:collapse; margin:6px 0; color:inherit; }
.tsh th { text-align:left; font-weight:600; color:var(--soft); }
.tsh td, .tsh th { padding:3px 14px 3px 0; border-bottom:1px solid var(--line);
  vertical-align:top; background:none; }
.tsh td.number { text-align:right; white-space:nowrap; }
.tsh .drawing { overflow-x:auto; border:1px solid var(--line); border-radius:8px;
  background:var(--panel); margin:8px 0; }
.tsh .loop-panel { border-left:4px solid var(--carry); padding-left:12px; }
.tsh svg { display:block; max-width:none; } .tsh svg text { fill:var(--fg); }
.tsh svg .name { font:600 12.5px ui-monospace,monospace; }
.tsh svg .type { font:11px ui-monospace,monospace; fill:var(--soft); }
.tsh svg .badge { font:10px system-ui; text-anchor:end; fill:var(--soft); }
.tsh .frame { fill:var(--bg); stroke:var(--line); }
.tsh .frame.loop { stroke:var(--carry); stroke-width:2; }
.tsh .frame-title { font:600 13px system-ui; }
.tsh .box rect { stroke-width:1.4; } .tsh .box.input rect, .tsh .box.result rect {
  stroke-dasharray:4 3; }
.tsh .box.invariant rect { fill:var(--invariant-bg); stroke:var(--invariant); }
.tsh .box.xs rect { fill:var(--xs-bg); stroke:var(--xs); }
.tsh .box.carry rect { fill:var(--carry-bg); stroke:var(--carry); }
.tsh .edge { fill:none; stroke-width:1.3; opacity:.65; }
.tsh .edge.invariant { stroke:var(--invariant); } .tsh .edge.xs { stroke:var(--xs); }
.tsh .edge.carry { stroke:var(--carry); }
.tsh .edge.back { stroke:var(--carry); stroke-dasharray:6 4; stroke-width:1.6; }
.tsh .dim .box:not(.near), .tsh .dim .edge:not(.near) { opacity:.12; }
.tsh .edge.near { opacity:1; stroke-width:2.2; }
.tsh .key { display:inline-block; padding:0 8px; border-radius:9px; margin-right:8px;
  border:1.4px solid; }
.tsh .key.invariant { color:var(--invariant); background:var(--invariant-bg); }
.tsh .key.xs { color:var(--xs); background:var(--xs-bg); }
.tsh .key.carry { color:var(--carry); background:var(--carry-bg); }
.tsh .as-loop { border:1.4px solid var(--carry); background:var(--carry-bg); border-radius:8px;
  padding:10px 14px; margin:10px 0; }
.tsh details { margin:6px 0; } .tsh summary { cursor:pointer; color:var(--soft); }
"""

SCRIPT = """
document.querySelectorAll('.tsh svg').forEach(function (svg) {
  svg.querySelectorAll('.box').forEach(function (box) {
    box.addEventListener('mouseenter', function () {
      var key = box.dataset.key, near = {};
      near[key] = true;
      svg.querySelectorAll('.edge').forEach(function (edge) {
        var is = edge.dataset.from === key || edge.dataset.to === key;
        edge.classList.toggle('near', is);
        if (is) { near[edge.dataset.from] = near[edge.dataset.to] = true; }
      });
      svg.querySelectorAll('.box').forEach(function (other) {
        other.classList.toggle('near', Boolean(near[other.dataset.key]));
      });
      svg.classList.add('dim');
    });
    box.addEventListener('mouseleave', function () { svg.classList.remove('dim'); });
  });
});
"""
