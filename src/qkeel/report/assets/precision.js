// Draws the chart of a precision study from #report-data.
(() => {
  "use strict";
  const {human, unique, frame, controls, start, colour, key, view, axis, keep, logTicks} = Kit;
  const data = Kit.data();
  const NUMBERS = [["logit_error", "error of logits (nats)"], ["output_error", "error of the output (share)"]];
  const lineOf = (row) => `${row.format}, ${row.kernel}`;
  const choice = {data: data.rows[0].data, remedy: data.rows[0].remedy, number: "logit_error"};

  function error(width) {
    const values = (name) => unique(data.rows.map((row) => row[name])).map((value) => [value, value]);
    controls("error", choice, [["Logits", "data", values("data")], ["Remedy", "remedy", values("remedy")], ["Number", "number", NUMBERS]]);
    const log = view("error", {scale: "log"}).scale === "log", names = unique(data.rows.map(lineOf));
    const own = data.rows.filter((row) => row.data === choice.data && row.remedy === choice.remedy);
    const taken = (number) => own.map((row) => ({x: row.max_logit, value: row[number], line: lineOf(row)})).filter((p) => p.value > 0 && p.x > 0);
    const seen = taken(choice.number), predicted = choice.number === "logit_error" ? taken("predicted_error") : [];
    keep("error", own);
    document.querySelector('[data-legend="error"]').replaceChildren(...names.map((name, i) => {
      const item = document.createElement("span"), text = document.createElement("span");
      [item.className, text.className, text.textContent] = ["key", "key-name", name];
      item.append(key(i), text);
      return item;
    }));
    const xs = [...seen, ...predicted].map((p) => p.x), low = Math.min(...xs) / 1.1, high = Math.max(...xs) * 1.1;
    const line = (points, name, i, more) => Plot.line(points.filter((p) => p.line === name), {x: "x", y: "value", stroke: colour(i), strokeWidth: 1.8, ...more});
    return frame("error", width, Math.min(420, Math.max(300, width * 0.45)), {
      marginLeft: 60, marginRight: 20, marginTop: 24, marginBottom: 40, color: {type: "identity"},
      x: {type: "log", domain: [low, high], ticks: logTicks(low, high), tickFormat: (x) => human(x), label: "largest logit (nats)"},
      y: axis([...seen, ...predicted], NUMBERS.find(([name]) => name === choice.number)[1], log, [data.tolerance]),
      marks: [
        Plot.ruleY([data.tolerance], {stroke: "var(--alarm)", ariaDescription: "tolerance"}),
        ...names.flatMap((name, i) => [line(predicted, name, i, {strokeDasharray: "3 3", strokeOpacity: 0.6}), line(seen, name, i, {ariaDescription: name})]),
        Plot.tip(seen, Plot.pointer({x: "x", y: "value", title: (p) => `${p.line}\nlargest logit ${human(p.x)}\nerror ${human(p.value)}`, fill: "var(--paper)", stroke: "var(--rule)", fontSize: 12}))
      ]
    });
  }

  start({error});
})();
