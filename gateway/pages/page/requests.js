// The latest requests, and one of them as a waterfall.

const PARTS = [
  ["receive", "receive"], ["tokenise", "tokenise"], ["dispatch", "dispatch"], ["retry", "lost to retries"],
  ["queue", "prefill queue"], ["prefill", "prefill"], ["kv_wait", "transfer waits"],
  ["kv_exposed", "transfer exposed"], ["decode_queue", "decode queue"], ["network", "network, other"],
  ["decode", "decode"], ["respond", "respond"],
];
const ALWAYS = new Set(["tokenise", "queue", "prefill", "kv_exposed", "decode_queue", "decode"]);

const knownRequests = new Map();
let chosen = null; // the request itself: it stays when it has left the list
let isFollowing = true; // until one is chosen, the newest is shown

const REQUEST_COLUMNS = ["ended", "id", "tokens", "TTFT", "total", "outcome"];

function showRequests(figures) {
  const requests = figures.requests;
  if (isFollowing && requests.length) chosen = requests[0];
  const items = requests.length ? [{ id: "\nheading" }, ...requests] : [{ id: "\nempty" }];
  keyed($("requests"), knownRequests, items, (request) => request.id, createRequest, updateRequest);
  showWaterfall();
}

function createRequest(request) {
  if (request.id === "\nempty") return { element: make("p", { class: "empty" }, "No request has ended yet.") };
  const kinds = ["", "id", "tokens", "num", "num", ""];
  const cells = kinds.map((kind) => make("span", kind ? { class: kind } : {}));
  if (request.id === "\nheading") {
    cells.forEach((cell, at) => (cell.textContent = REQUEST_COLUMNS[at]));
    return { element: make("div", { class: "row heading" }, ...cells) };
  }
  const element = make("button", { class: "row", type: "button" }, ...cells);
  element.addEventListener("click", () => {
    isFollowing = false;
    chosen = request;
    for (const [id, row] of knownRequests) row.element.setAttribute("aria-pressed", String(id === chosen.id));
    showWaterfall();
  });
  return { element, cells };
}

function updateRequest(row, request) {
  if (!row.cells) return;
  const values = [
    `${age(request.age_s)} ago`, request.id.slice(0, 8), `${count(request.prompt_tokens)} → ${count(request.output_tokens)}`,
    seconds(request.ttft_s), seconds(request.total_s), request.outcome,
  ];
  values.forEach((value, at) => (row.cells[at].textContent = value));
  row.cells[5].className = request.failed ? "bad" : request.outcome === "abort" ? "warn" : "";
  row.element.setAttribute("aria-pressed", String(chosen !== null && chosen.id === request.id));
}

// The parts as [name, label, start, length] on the request's own time.
function spans(request) {
  const placed = [];
  let at = 0;
  for (const [name, label] of PARTS) {
    const length = request.parts[`${name}_s`];
    if (length > 0 || ALWAYS.has(name)) placed.push([name, label, at, length]);
    at += length;
    if (name === "prefill" && request.kv_hidden_s > 0) {
      // It ended with the prefill at the latest; where in it is not known.
      const hidden = Math.min(request.kv_hidden_s, length);
      placed.push(["hidden", "transfer hidden", at - hidden, hidden]);
    }
  }
  return placed;
}

let drawnId = null;

function showWaterfall() {
  const box = $("waterfall");
  if (chosen === null) {
    box.replaceChildren(make("p", {}, "The waterfall of a request appears here."));
    return;
  }
  if (drawnId === chosen.id) return; // it has ended: nothing changes any more
  drawnId = chosen.id;
  const request = chosen, total = Math.max(request.total_s, 1e-9);
  const way = request.decode_worker ? `${request.prefill_worker || "its own prefill"} → ${request.decode_worker}` : "sent to no worker";
  const facts = [
    way, `${request.prompt_tokens} tokens in, ${request.output_tokens} out`, request.slo_class, request.outcome,
    `${request.attempts} attempt${request.attempts === 1 ? "" : "s"}`, `KV ${bytes(request.kv_bytes)}`,
    `TTFT\u00a0${seconds(request.ttft_s)}`, `TPOT\u00a0${seconds(request.tpot_s)}`,
  ];
  const rows = spans(request).map(([name, label, start, length]) => {
    const bar = make("i", { class: `p-${name}` });
    bar.style.left = `min(${(100 * start) / total}%, 100% - 2px)`;
    bar.style.width = `${(100 * length) / total}%`;
    const lane = make("div", { class: "lane" });
    if (request.ttft_s !== null) {
      const mark = make("u", { title: "first token" });
      mark.style.left = `${Math.min(99.8, (100 * request.ttft_s) / total)}%`;
      lane.append(mark);
    }
    if (length > 0) lane.append(bar); // over the mark
    return make("div", { class: "span" }, make("span", {}, label), lane, make("span", { class: "num" }, seconds(length)));
  });
  const sum = make("div", { class: "span" }, make("b", {}, "total"), make("span", {}), make("b", { class: "num" }, seconds(request.total_s)));
  box.replaceChildren(
    make("h3", {}, make("code", {}, request.id)), make("p", {}, facts.join(" · ")), ...rows, sum,
    make("p", {}, "The thin line is the first token. Lengths are measured; where network time lay is not known."),
  );
}
