// Draws the charts of a watched model from #report-data.
(() => {
  "use strict";
  const {human, finite, ascending, frame, controls, ramp, readable, endLabels, redraw, start, colour, dash, key, view, smoothed, axis, above, keep} = Kit;
  const data = Kit.data();
  const FLOOR = 0.1; // a logarithmic axis cannot show a logit of 0
  const choice = {run: data.runs[0].name, map: "max_logit", runs: "max_logit"};

  const current = () => data.runs.find((run) => run.name === choice.run) ?? data.runs[0];
  const steps = (x) => x.toLocaleString("en-US");
  const what = (name) => (data.fields[name] ? `${data.fields[name].meaning} (${data.fields[name].unit})` : name.replaceAll("_", " "));
  // Depth in the model: blue at the input, over violet, to orange at the output; lighter on dark paper.
  const hue = (i, n) => 225 + 165 * (n > 1 ? i / (n - 1) : 0.5);
  const depth = (i, n) => `hsl(${hue(i, n).toFixed(0)} var(--depth))`;
  const severity = (alarm) => (alarm.severity === "notice" ? "var(--series-5)" : "var(--alarm)");

  const tips = (points, text, more = {}) =>
    Plot.tip(points, Plot.pointer({
      x: "step", y: "value", ...more, title: text, fill: "var(--paper)", stroke: "var(--rule)", fontSize: 12, lineHeight: 1.25
    }));

  const points = (values, run, more = {}) => run.step.map((step, i) => ({step, value: values[i], ...more}))
    .filter((p) => p.value !== null && Number.isFinite(p.value));

  const byLayer = (run, name, more = {}) => (run.lines[name] ?? []).flatMap((values, layer) => points(values, run, {layer, name, ...more}));

  // Lines by layer as the reader chose to see them; the numbers as they were recorded are kept for the CSV.
  function chosen(chart, start, run, layers, whole = [], least = -Infinity) {
    const seen = view(chart, start), log = seen.scale === "log";
    keep(chart, [...layers, ...whole].map((p) => ({run: run.name, layer: p.layer === undefined ? "whole model" : run.layers[p.layer], number: p.name ?? chart, step: p.step, value: p.value})));
    const lines = layers.map((p) => ({...p, line: `${p.name} ${p.layer}`}));
    return {log, layers: above(smoothed(lines, "line", seen.smooth), log, least), whole: above(smoothed(whole, "line", seen.smooth), log, least)};
  }

  // A run of one sample has dots instead of lines.
  function layerLines(run, all, more = {}) {
    const n = run.layers.length;
    if (run.step.length === 1) return [Plot.dot(all, {x: "step", y: "value", r: 3, fill: (p) => depth(p.layer, n), ...more})];
    return [Plot.line(all, {
      x: "step", y: "value", z: "layer", stroke: (p) => depth(p.layer, n), strokeWidth: n > 24 ? 0.8 : 1.1, strokeOpacity: 0.75,
      strokeLinejoin: "round", ariaDescription: "layers", ...more
    })];
  }

  // The name of each layer at the end of its line; `ends` of a linear axis, which chooses its own, are those of all points.
  function layerNames(run, all, scale, size, facet = {}) {
    const n = run.layers.length;
    if (n < 2) return [];
    const last = new Map(all.map((p) => [p.layer, p]));
    const values = all.map((p) => p.value), linear = scale.domain ?? [scale.zero ? Math.min(0, ...values) : Math.min(...values), Math.max(...values)];
    const ends = [...last.values()].map((p) => ({...p, name: run.layers[p.layer], fill: depth(p.layer, n)}));
    return endLabels(ends, {...size, axis: {...scale, domain: linear}, ...facet});
  }
  const labelRoom = (run) => (run.layers.length < 2 ? 0 : Math.min(90, 6.4 * Math.max(...run.layers.map((name) => name.length)) + 6));

  const thick = (all) => Plot.line(all, {
    x: "step", y: "value", stroke: "var(--ink)", strokeWidth: 6, strokeOpacity: 0.16, strokeLinejoin: "round", ariaDescription: "whole model"
  });

  function depthLegend(name, run) {
    const n = run.layers.length, holder = document.querySelector(`[data-legend="${name}"]`);
    if (n < 2) { holder.replaceChildren(); return; }
    const ends = [`layer ${run.layers[0]}`, run.layers[n - 1]];
    const shown = Math.min(n, 64);
    holder.replaceChildren(Plot.plot({
      width: 250, height: 34, marginLeft: 8, marginRight: 8, marginTop: 18, marginBottom: 4, axis: null,
      style: {fontSize: "11px", background: "none", overflow: "visible"}, ariaLabel: "Scale of colour: depth of the layer",
      x: {type: "linear", domain: [0, shown]}, color: {type: "identity"},
      marks: [
        Plot.rect(Array.from({length: shown}, (_, i) => i), {x1: (i) => i, x2: (i) => i + 1, fill: (i) => depth(i, shown), insetLeft: -0.3, insetRight: -0.3}),
        Plot.text(ends, {frameAnchor: "top-left", text: (_, i) => (i === 0 ? ends[0] : ""), dy: -13, fill: "var(--ink)"}),
        Plot.text(ends, {frameAnchor: "top-right", text: (_, i) => (i === 1 ? ends[1] : ""), dy: -13, fill: "var(--ink)"})
      ]
    }));
  }

  const xAxis = (width, run) => ({
    label: "step", ticks: run.step.length === 1 ? run.step : Math.max(3, Math.floor(width / 110)), insetRight: 3,
    tickFormat: steps, ...(run.step.length === 1 ? {domain: [run.step[0] - 1, run.step[0] + 1]} : {})
  });

  const alarmLine = (side = "left") => [
    Plot.ruleY([data.alarm], {stroke: "var(--alarm)", strokeWidth: 1, ariaDescription: "alarm threshold"}),
    Plot.text([data.alarm], {
      y: (d) => d, text: (d) => `alarm ${human(d)}`, frameAnchor: side, textAnchor: side === "left" ? "start" : "end", dx: side === "left" ? 4 : -4, dy: -7,
      fill: "var(--alarm)", stroke: "var(--paper)", strokeWidth: 3
    })
  ];

  const tall = (width) => Math.min(400, Math.max(280, width * 0.4));
  const layerTip = (run) => (p) => `${p.layer === undefined ? "whole model" : `layer ${run.layers[p.layer]}`}\nstep ${steps(p.step)}: ${human(p.exact)}`;

  // ── The charts ─────────────────────────────────────────────────────────────────────────────────────────────────
  const OVERLAID = {max_logit: "largest attention logit (nats)", entropy: "attention entropy (nats)", train_loss: "training loss"};

  function runs(width) {
    const names = Object.keys(OVERLAID).filter((name) => data.runs.some((run) => run.values[name]));
    if (!names.includes(choice.runs)) choice.runs = names[0];
    controls("runs", choice, [["Number", "runs", names.map((name) => [name, OVERLAID[name]])]]);
    const name = choice.runs, logits = name === "max_logit";
    const shown = data.runs.filter((run) => run.values[name]);
    const seen = view("runs", {scale: "log", smooth: "1"}), log = seen.scale === "log" && logits;
    const recorded = shown.flatMap((run, i) => points(run.values[name], run, {run: i}));
    const all = above(smoothed(recorded, "run", seen.smooth), log, FLOOR);
    keep("runs", recorded.map((p) => ({run: shown[p.run].name, step: p.step, [name]: p.value})));
    document.querySelector('[data-legend="runs"]').replaceChildren(...shown.map((run, i) => {
      const item = document.createElement("span"), text = document.createElement("span");
      text.className = "key-name";
      text.textContent = run.name;
      item.className = "key";
      item.append(key(i), text);
      return item;
    }));
    return frame("runs", width, tall(width), {
      marginLeft: 56, marginRight: 60, marginTop: 24, marginBottom: 36, color: {type: "identity"},
      x: {label: "step", ticks: Math.max(3, Math.floor(width / 110)), tickFormat: steps},
      y: axis(all, OVERLAID[name], log, logits ? [data.alarm] : []),
      marks: [
        ...(logits ? alarmLine() : []),
        ...shown.map((run, i) => Plot.line(all.filter((p) => p.run === i), {x: "step", y: "value", stroke: colour(i), strokeDasharray: dash(i), strokeWidth: 1.8, ariaDescription: run.name})),
        Plot.dot(all, Plot.selectLast({x: "step", y: "value", z: "run", r: 3, fill: (p) => colour(p.run)})),
        Plot.text(all, Plot.selectLast({x: "step", y: "value", z: "run", dx: 7, textAnchor: "start", fontWeight: 600, fill: (p) => colour(p.run), text: (p) => human(p.exact)})),
        tips(all, (p) => `${shown[p.run].name}\nstep ${steps(p.step)}: ${human(p.exact)}`)
      ]
    });
  }

  // What an autopilot did, in up to four rows of labels that do not run into each other; the lines have all.
  function labelled(run, width) {
    const steps = ((run.step.at(-1) - run.step[0]) || 1) / Math.max(1, width - 190), rows = [[], [], [], []], ends = rows.map(() => -Infinity);
    for (const one of run.interventions) {
      const row = ends.findIndex((end) => end <= one.step), last = run.interventions[run.interventions.indexOf(one) - 1];
      if (row < 0 || (last && last.label === one.label && row > 0)) continue;
      rows[row].push(one);
      ends[row] = one.step + steps * (6 * one.label.length + 8);
    }
    return rows;
  }

  function growth(width) {
    const run = current();
    const {log, layers, whole} = chosen("growth", {scale: "log", smooth: "1"}, run, byLayer(run, "max_logit"), points(run.values.max_logit ?? [], run), FLOOR);
    const evaluated = above((run.eval.max_logit ?? []).map((value, i) => ({step: run.eval.step[i], value})), log, FLOOR);
    const near = (step) => whole.reduce((best, p) => (Math.abs(p.step - step) < Math.abs(best.step - step) ? p : best), whole[0]);
    const alarms = whole.length ? run.alarms.map((alarm) => ({...alarm, value: near(alarm.step).value})) : [];
    const room = width > 620, lead = run.leader;
    const full = lead ? `layer ${run.layers[lead.layer]} · head ${lead.head}` : "";
    const label = full.length > 18 ? `head ${lead.head}` : full; // the caption's sentence has the layer's name
    depthLegend("growth", run);
    const y = axis([...layers, ...whole, ...evaluated], "largest attention logit (nats)", log, [data.alarm]), names = labelRoom(run);
    return frame("growth", width, tall(width), {
      marginLeft: 56, marginRight: (room ? 132 : 52) + names, marginTop: 24, marginBottom: 36, color: {type: "identity"},
      x: xAxis(width, run), y,
      marks: [
        ...alarmLine(run.interventions.length ? "right" : "left"), // their lines stand where logits rise, at the left
        thick(whole),
        ...layerLines(run, layers),
        ...layerNames(run, layers, y, {height: tall(width), top: 24, bottom: 36}),
        Plot.dot(evaluated, {x: "step", y: "value", r: 3, stroke: "var(--faint)", fill: "var(--paper)", ariaDescription: "not trained"}),
        Plot.dot(alarms, {x: "step", y: "value", r: 4.5, fill: severity, stroke: "var(--paper)", strokeWidth: 1.5, ariaDescription: "alarms"}),
        Plot.ruleX(run.interventions, {x: "step", stroke: "var(--series-2)", strokeDasharray: "2 3", strokeWidth: 1.4, title: "text", ariaDescription: "interventions"}),
        ...labelled(run, width).map((labels, row) => Plot.text(labels, {x: "step", text: "label", title: "text", frameAnchor: "bottom", textAnchor: "start", dx: 3, dy: -7 - 12 * row, fontSize: 10, fill: "var(--series-2)", stroke: "var(--paper)", strokeWidth: 3})),
        Plot.dot(whole, Plot.selectLast({x: "step", y: "value", r: 3.2, fill: "var(--ink)"})),
        Plot.text(whole, Plot.selectLast({
          x: "step", y: "value", dx: 8 + names, textAnchor: "start", fontWeight: 650, fill: "var(--ink)", lineHeight: 1.2,
          text: (p) => (room && label ? `${human(p.exact)}\n${label}` : human(p.exact))
        })),
        tips([...layers, ...whole], layerTip(run))
      ]
    });
  }

  function map(width) {
    const run = current(), last = run.last;
    if (!last) return frame("map", width, 40, {axis: null, marks: [Plot.text(["no head was measured"], {frameAnchor: "left"})]});
    const names = Object.keys(last.fields);
    if (!names.includes(choice.map)) choice.map = names[0];
    controls("map", choice, [["Number", "map", names.map((name) => [name, name.replaceAll("_", " ")])]]);
    const cells = last.fields[choice.map].flatMap((row, layer) => row.map((value, head) => ({layer: run.layers[layer], head, value}))).filter((c) => c.value !== null);
    const values = cells.map((c) => c.value), low = Math.min(...values), high = Math.max(...values);
    keep("map", cells.map((c) => ({run: run.name, step: last.step, layer: c.layer, head: c.head, [choice.map]: c.value})));
    const scale = {...mapScale(choice.map, low, high), label: what(choice.map)};
    const heads = ascending(last.fields[choice.map].flatMap((row) => row.map((_, head) => head)));
    const rows = run.layers, left = Math.min(170, 14 + 6.5 * Math.max(...rows.map((name) => name.length)));
    const high1 = Math.max(8, Math.min(26, 640 / rows.length)), each = (width - left) / heads.length;
    const paint = Plot.plot({axis: null, width: 9, height: 9, color: {...scale, label: undefined}, marks: [Plot.dot(values, {x: 0, y: 0, fill: (v) => v})]}).scale("color");
    ramp("map", scale);
    return frame("map", width, high1 * rows.length + 62, {
      marginLeft: left, marginRight: 4, marginTop: 8, marginBottom: 40, color: {...scale, label: undefined},
      x: {type: "band", domain: heads, label: "head", labelAnchor: "right", labelArrow: "none", tickSize: 0, padding: heads.length > 40 ? 0 : 0.04, ticks: heads.filter((h) => h % Math.ceil(24 / Math.max(1, each)) === 0)},
      y: {type: "band", domain: rows, label: null, tickSize: 0, padding: rows.length > 40 ? 0 : 0.06, ticks: rows.filter((_, i) => i % Math.ceil(12 / high1) === 0)},
      marks: [
        Plot.cell(cells, {x: "head", y: "layer", fill: "value", ariaDescription: "heads"}),
        ...(each > 38 && high1 > 15 ? [Plot.text(cells, {x: "head", y: "layer", text: (c) => human(c.value), fontSize: 11, fill: (c) => readable(paint.apply(c.value))})] : []),
        Plot.tip(cells, Plot.pointer({x: "head", y: "layer", fill: "var(--paper)", stroke: "var(--rule)", fontSize: 12, lineHeight: 1.25, title: (c) => `layer ${c.layer}, head ${c.head}\n${human(c.value)}`}))
      ]
    });
  }

  // Both signs: two colours from zero, logarithmic on both sides where they span much. Logits: up to the alarm line at least, so that a harmless run never looks hot.
  function mapScale(name, low, high) {
    if (low < 0 && high > 0) {
      const most = Math.max(-low, high);
      if (most <= 20) return {type: "diverging", scheme: "RdBu", reverse: true, domain: [-most, most]};
      return {type: "diverging-symlog", constant: 1, scheme: "RdBu", reverse: true, domain: [-most, most]};
    }
    if (name === "max_logit" && low > 0) return {type: "log", domain: [Math.min(1, low), Math.max(data.alarm, high)], scheme: "magma"};
    const ends = low < high ? [low, high] : [low, low + (Math.abs(low) || 1)];
    return {type: low > 0 && high / low > 30 ? "log" : "linear", domain: ends, scheme: name.includes("entropy") ? "viridis" : "magma"};
  }

  function entropy(width) {
    const run = current();
    const {log, layers, whole} = chosen("entropy", {scale: "linear", smooth: "1"}, run, byLayer(run, "entropy"), points(run.values.entropy ?? [], run), 1e-3);
    depthLegend("entropy", run);
    const y = axis([...layers, ...whole], "attention entropy (nats)", log, [], {zero: true}), names = labelRoom(run);
    return frame("entropy", width, tall(width) * 0.85, {
      marginLeft: 56, marginRight: 52 + names, marginTop: 24, marginBottom: 36, color: {type: "identity"},
      x: xAxis(width, run), y,
      marks: [
        ...(log ? [] : [Plot.ruleY([0], {stroke: "var(--rule)"})]), thick(whole), ...layerLines(run, layers),
        ...layerNames(run, layers, y, {height: tall(width) * 0.85, top: 24, bottom: 36}),
        Plot.text(whole, Plot.selectLast({x: "step", y: "value", dx: 7 + names, textAnchor: "start", fontWeight: 650, fill: "var(--ink)", text: (p) => human(p.exact)})),
        tips([...layers, ...whole], layerTip(run))
      ]
    });
  }

  function norms(width) {
    const run = current(), wide = width > 640;
    const sides = ["query_norm", "key_norm"].filter((name) => run.lines[name]);
    const recorded = sides.flatMap((name, i) => byLayer(run, name, {fx: wide ? i : 0, fy: wide ? 0 : i}));
    const {log, layers: all} = chosen("norms", {scale: "log", smooth: "1"}, run, recorded);
    const facet = {fx: "fx", fy: "fy"};
    depthLegend("norms", run);
    const height = wide ? tall(width) * 0.85 : 470, y = axis(all, "mean norm (L2)", log);
    const named = wide ? sides.flatMap((name, i) => layerNames(run, all.filter((p) => p.fx === i), y, {height, top: 40, bottom: 36}, facet)) : [];
    return frame("norms", width, height, {
      marginLeft: 56, marginRight: 16 + (wide ? labelRoom(run) : 0), marginTop: 40, marginBottom: 36, color: {type: "identity"},
      fx: {axis: null, paddingInner: 0.12, paddingOuter: 0}, fy: {axis: null, paddingInner: wide ? 0 : 0.2, paddingOuter: 0},
      x: {...xAxis(wide ? width / 2 : width, run)}, y,
      marks: [
        Plot.text(sides.map((name, i) => ({fx: wide ? i : 0, fy: wide ? 0 : i, text: name === "query_norm" ? "queries |q|" : "keys |k|"})), {...facet, text: "text", frameAnchor: "top-left", dy: -16, fontWeight: 600, fontSize: 12.5, fill: "var(--ink)"}),
        ...layerLines(run, all, facet),
        ...named,
        tips(all, layerTip(run), facet)
      ]
    });
  }

  function loss(width) {
    const run = current(), seen = view("loss", {scale: "linear", smooth: "1", from: "0"}), log = seen.scale === "log";
    const recorded = points(run.values.train_loss ?? [], run, {name: "train_loss"}), held = points(run.values.val_loss ?? [], run, {name: "val_loss"});
    const all = smoothed(recorded, "name", seen.smooth), last = Math.max(...all.map((p) => p.step));
    const late = [...all, ...held].filter((p) => p.step >= Number(seen.from) * last), values = finite(late.map((p) => p.value));
    keep("loss", [...recorded, ...held].map((p) => ({run: run.name, number: p.name, step: p.step, loss: p.value})));
    return frame("loss", width, tall(width) * 0.8, {
      marginLeft: 56, marginRight: 52, marginTop: 24, marginBottom: 36,
      x: xAxis(width, run), y: axis(late, "training loss", log, [], values.length > 1 ? {domain: [Math.min(...values), Math.max(...values)]} : {}),
      marks: [
        run.step.length === 1 ? Plot.dot(all, {x: "step", y: "value", fill: "var(--series-1)"}) : Plot.line(all, {x: "step", y: "value", stroke: "var(--series-1)", strokeWidth: 1.5, clip: true, ariaDescription: "training loss"}),
        Plot.dot(held, {x: "step", y: "value", r: 2.2, fill: "var(--series-2)", clip: true, ariaDescription: "held out"}),
        Plot.text(all, Plot.selectLast({x: "step", y: "value", dx: 7, textAnchor: "start", fontWeight: 650, fill: "var(--series-1)", text: (p) => p.value.toFixed(3)})),
        tips(all, (p) => `step ${steps(p.step)}: ${p.value.toFixed(3)}`)
      ]
    });
  }

  // ── Drawing ────────────────────────────────────────────────────────────────────────────────────────────────────
  if (document.querySelector('[data-controls="run"]')) {
    controls("run", choice, [["Charts of run", "run", data.runs.map((run) => [run.name, run.name])]], redraw);
  }
  start({runs, growth, map, entropy, norms, loss});
})();
