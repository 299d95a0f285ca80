// Pools of workers, and the KV that moves between them.

const STALE_S = 3; // snapshots come ten times a second
const REMEMBER_MS = 60000;
const HIGH = 0.9;
const WORKER_COLUMNS = ["worker", "KV used", "running", "waiting", "queued tok", "transfers", "quarantine", "step", "tok/s"];
const FLOW_COLUMNS = ["from → to", "transfers", "bytes", "hidden / exposed", "hidden", "exposed", "waited"];
const FEW_FLOWS = 8;

const knownWorkers = new Map(), knownFlows = new Map();
const lastSeen = new Map(); // worker id → { worker, at }
let showsAllFlows = false;

function heading(kind, columns) {
  const wide = new Set([columns[0], "KV used", "hidden / exposed"]);
  const cells = columns.map((name) => make("span", { class: wide.has(name) ? "" : "num", role: "columnheader" }, ...named(name)));
  return { element: make("div", { class: `row heading wide ${kind}`, role: "row" }, ...cells) };
}

// A column's name, with the colour of what it explains.
function named(name) {
  const colours = { hidden: "p-hidden", exposed: "p-kv_exposed" };
  return name in colours ? [make("i", { class: `swatch ${colours[name]}` }), name] : [name];
}

function numbers(columns) {
  return columns.map((name) => {
    const value = make("span", {});
    return { value, element: make("span", { class: "num", role: "cell" }, make("span", { class: "label" }, ...named(name)), value) };
  });
}

function workersToShow(workers, now) {
  for (const worker of workers) lastSeen.set(worker.id, { worker, at: now });
  for (const [id, seen] of lastSeen) if (now - seen.at > REMEMBER_MS) lastSeen.delete(id);
  const gone = [...lastSeen.values()].filter((seen) => seen.at < now);
  return [...workers, ...gone.map(({ worker, at }) => ({ ...worker, state: "gone", gone_s: (now - at) / 1000 }))];
}

function stateOf(worker) {
  if (worker.state === "gone") return [`gone for ${age(worker.gone_s)}`, "bad"];
  if (worker.state === "down") return ["no link", "bad"];
  if (worker.load_age_s === null) return ["no figures yet", "warn"];
  if (worker.load_age_s > STALE_S) return [`stale for ${age(worker.load_age_s)}`, "warn"];
  return worker.state === "up" ? ["up", "good"] : [worker.state, "warn"];
}

function showWorkers(figures) {
  const shown = workersToShow(figures.workers, Date.now());
  const rows = [{ id: "\nheading" }];
  const pools = [];
  for (const role of ["prefill", "decode"]) {
    const pool = shown.filter((worker) => worker.role === role);
    const up = pool.filter((worker) => worker.state === "up").length;
    pools.push(`${role} ${up} of ${pool.length} up`);
    rows.push({ id: `\n${role}`, title: `${role} pool` }, ...pool);
  }
  $("pools").textContent = pools.join(" · ");
  keyed($("workers"), knownWorkers, rows, (row) => row.id, createWorker, updateWorker);
}

function createWorker(worker) {
  if (worker.id === "\nheading") return heading("worker", WORKER_COLUMNS);
  if (worker.title) return { element: make("div", { class: "pool" }, worker.title) };
  const state = make("span", { class: "state" });
  const fill = make("i", {}), share = make("span", {});
  const cells = numbers(WORKER_COLUMNS.slice(2));
  const bar = make("div", { class: "bar", role: "img" }, fill);
  const meter = make("div", { class: "meter", role: "cell" }, make("b", { class: "label" }, "KV"), bar, share);
  const name = make("span", { class: "name", role: "cell" }, make("b", {}, worker.id), state);
  return {
    state, fill, share, bar, cells,
    element: make("div", { class: "row worker", role: "row" }, name, meter, ...cells.map((cell) => cell.element)),
  };
}

function updateWorker(row, worker) {
  if (!row.cells) return;
  const [text, kind] = stateOf(worker);
  row.state.textContent = text;
  row.state.className = `state ${kind}`;
  row.element.classList.toggle("away", worker.state === "gone" || worker.state === "down");
  const total = worker.kv_blocks_total || 0;
  const used = total ? 1 - worker.kv_blocks_free / total : 0;
  row.fill.className = used > HIGH ? "fill high" : "fill";
  row.fill.style.width = `${100 * used}%`;
  row.share.textContent = total ? percent(used) : "–";
  row.bar.setAttribute("aria-label", `KV used ${row.share.textContent}`);
  const values = [
    count(worker.running), count(worker.waiting), count(worker.queued_tokens), count(worker.open_transfers),
    count(worker.kv_blocks_quarantined), seconds(worker.step_time_s), count(worker.tokens_per_s && Math.round(worker.tokens_per_s)),
  ];
  values.forEach((value, at) => (row.cells[at].value.textContent = value));
  row.cells[4].element.classList.toggle("warn", worker.kv_blocks_quarantined > 0);
  row.cells[1].element.classList.toggle("warn", worker.waiting > 0);
}

function showFlows(figures) {
  const flows = figures.flows, button = $("more-flows");
  $("flow-window").textContent = `last ${age(figures.flow_window_s)}, from prefill to decode workers`;
  button.hidden = flows.length <= FEW_FLOWS;
  button.textContent = showsAllFlows ? "show fewer" : `show all ${flows.length} pairs`;
  const rows = showsAllFlows ? flows : flows.slice(0, FEW_FLOWS);
  const most = Math.max(1e-9, ...flows.map((flow) => flow.hidden_s + flow.exposed_s));
  const items = rows.length ? [{ prefill: "\nheading" }, ...rows] : [{ prefill: "\nempty" }];
  keyed($("flows"), knownFlows, items, (flow) => `${flow.prefill}\n${flow.decode}`, createFlow, (row, flow) => updateFlow(row, flow, most));
}

function createFlow(flow) {
  if (flow.prefill === "\nheading") return heading("flow", FLOW_COLUMNS);
  if (flow.prefill === "\nempty") return { element: make("p", { class: "empty" }, "No KV has moved lately.") };
  const [transfers, size, ...times] = numbers(FLOW_COLUMNS.filter((name) => !name.includes("/ ") && !name.includes("→")));
  const hidden = make("i", { class: "p-hidden" }), exposed = make("i", { class: "p-kv_exposed" });
  const bar = make("div", { class: "bar", role: "img", "aria-label": "hidden and exposed time" }, hidden, exposed);
  const name = make("span", { class: "name", role: "cell" }, flow.prefill ? `${flow.prefill} → ${flow.decode}` : "other pairs");
  const cells = [transfers, size, ...times];
  return {
    hidden, exposed, cells,
    element: make("div", { class: "row flow", role: "row" }, name, transfers.element, size.element,
      make("div", { class: "meter", role: "cell" }, bar), ...times.map((cell) => cell.element)),
  };
}

function updateFlow(row, flow, most) {
  if (!row.cells) return;
  row.hidden.style.width = `${(100 * flow.hidden_s) / most}%`;
  row.exposed.style.width = `${(100 * flow.exposed_s) / most}%`;
  const values = [count(flow.transfers), bytes(flow.bytes), seconds(flow.hidden_s), seconds(flow.exposed_s), seconds(flow.wait_s)];
  values.forEach((value, at) => (row.cells[at].value.textContent = value));
}
