// Tiles and line charts.

const CHARTS = [
  { title: "Time to first token", unit: seconds, lines: [["p50", "ttft_p50_s"], ["p95", "ttft_p95_s"]] },
  { title: "Time per output token", unit: seconds, lines: [["p50", "tpot_p50_s"], ["p95", "tpot_p95_s"]] },
  { title: "Tokens per second", unit: count, lines: [["output", "output_tokens_per_s"], ["prompt", "prompt_tokens_per_s"]] },
  { title: "Sequences", unit: count, lines: [
    ["decoding", "decode_running"], ["wait for prefill", "prefill_waiting"],
    ["in prefill", "prefill_running"], ["wait to decode", "decode_waiting"],
  ] },
  { title: "KV used, decode pool", unit: percent, lines: [["used", "kv_used"]], top: 1 },
  { title: "Requests ended", unit: count, lines: [["finished", "finished"], ["failed", "failed"]], isPerSlot: true },
];
const HEIGHT = 140, LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 20;
const MIN_SLOTS = 24;
const MAX_GAP = 6; // slots without a value that a line still crosses

const shownCharts = CHARTS.map((chart) => {
  const keys = chart.lines.map(([name], at) => {
    const value = make("span", {});
    return { value, element: make("span", { class: "key" }, make("i", { class: `s${at}` }), `${name} `, value) };
  });
  const svg = draw("svg", { role: "img" });
  const title = make("b", {}, chart.title);
  const head = make("div", { class: "head" }, title, ...keys.map((key) => key.element));
  const shown = { ...chart, keys, svg, heading: title, pointer: null, element: make("div", { class: "card chart" }, head, svg) };
  svg.addEventListener("pointermove", (event) => {
    shown.pointer = event.clientX - svg.getBoundingClientRect().left;
    drawChart(shown);
  });
  svg.addEventListener("pointerleave", () => {
    shown.pointer = null;
    drawChart(shown);
  });
  return shown;
});

function niceMax(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function drawChart(chart) {
  const { svg, columns, slot } = chart;
  if (!columns) return;
  const width = Math.max(200, svg.clientWidth);
  const length = columns[0].length;
  const slots = Math.max(length, MIN_SLOTS);
  const top = chart.top || niceMax(Math.max(0, ...columns.flat().filter((value) => value !== null)));
  const x = (at) => LEFT + ((at + slots - length) / Math.max(1, slots - 1)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(share * top);
    parts.push(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
    parts.push(draw("text", { class: "axis", x: LEFT - 8, y: at + 4, "text-anchor": "end" }, rounded(chart.unit(share * top))));
  }
  for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    const text = share === 1 ? "now" : `−${age((1 - share) * slots * slot)}`;
    const at = LEFT + share * (width - LEFT - RIGHT);
    parts.push(draw("text", { class: "axis", x: at, y: HEIGHT - 4, "text-anchor": anchor }, text));
  }
  columns.forEach((column, number) => parts.push(...drawLine(column, number, x, y)));
  let at = length - 1;
  if (chart.pointer !== null && length) {
    const step = (width - LEFT - RIGHT) / Math.max(1, slots - 1);
    at = Math.round((chart.pointer - LEFT) / step) - (slots - length);
    at = Math.min(length - 1, Math.max(0, at));
    parts.push(draw("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }));
  }
  if (columns.every((column) => column.every((value) => value === null))) {
    const middle = LEFT + (width - LEFT - RIGHT) / 2;
    parts.push(draw("text", { class: "axis", x: middle, y: HEIGHT / 2 - 12, "text-anchor": "middle" }, "nothing yet"));
  }
  chart.keys.forEach((key, number) => {
    key.value.textContent = chart.unit(at >= 0 ? columns[number][at] : null);
  });
  svg.setAttribute("aria-label", `${chart.title}: ${chart.keys.map((key) => key.element.textContent).join(", ")}`);
  svg.replaceChildren(...parts);
}

function drawLine(column, number, x, y) {
  const parts = [];
  let path = "", last = -Infinity, length = 0;
  const flush = () => {
    if (length > 1) parts.push(draw("path", { class: `series s${number}`, d: path }));
    else if (length) parts.push(draw("circle", { class: `s${number}`, cx: x(last), cy: y(column[last]), r: 2.5 }));
  };
  column.forEach((value, at) => {
    if (value === null) return;
    const goesOn = at - last <= MAX_GAP + 1;
    if (!goesOn) flush();
    path = `${goesOn ? `${path}L` : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    length = goesOn ? length + 1 : 1;
    last = at;
  });
  flush();
  return parts;
}

function showCharts(figures) {
  if (!$("charts").firstChild) $("charts").append(...shownCharts.map((chart) => chart.element));
  for (const chart of shownCharts) {
    chart.columns = chart.lines.map(([, name]) => figures.series[name]);
    chart.slot = figures.slot_s;
    if (chart.isPerSlot) chart.heading.textContent = `${chart.title} in ${rounded(seconds(chart.slot))}`;
    drawChart(chart);
  }
}

const knownTiles = new Map();

function showTiles(figures) {
  const now = figures.summary;
  const sum = (name, role) => figures.workers.reduce(
    (total, worker) => total + ((!role || worker.role === role) && worker[name] || 0), 0);
  const tail = (p95, p99) => `p95\u00a0${seconds(p95)} · p99\u00a0${seconds(p99)}`;
  const tiles = [
    ["TTFT p50", seconds(now.ttft_p50_s), tail(now.ttft_p95_s, now.ttft_p99_s)],
    ["TPOT p50", seconds(now.tpot_p50_s), tail(now.tpot_p95_s, now.tpot_p99_s)],
    ["Output tokens/s", count(now.output_tokens_per_s), `prompts ${count(now.prompt_tokens_per_s)} tok/s`],
    ["Decoding", count(sum("running", "decode")), `${count(sum("running", "prefill"))} in prefill · ${count(sum("waiting", "prefill"))} waiting for it`],
    ["Open requests", count(figures.open_requests), "on this gateway"],
    ["Finished", count(now.finished), `${count(now.failed)} failed, last ${age(now.window_s)}`, now.failed > 0],
  ];
  keyed($("tiles"), knownTiles, tiles, (tile) => tile[0], ([name]) => {
    const value = make("div", { class: "value" }), note = make("div", { class: "note" });
    return { value, note, element: make("div", { class: "card tile" }, make("div", { class: "name" }, name), value, note) };
  }, (row, [, value, note, isBad]) => {
    row.value.textContent = value;
    row.note.textContent = note;
    row.note.classList.toggle("bad", Boolean(isBad));
  });
}

addEventListener("resize", () => shownCharts.forEach(drawChart));
