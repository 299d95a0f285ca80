// Asks the gateway once a second, more rarely while it does not answer, and says how old it all is.

const POLL_MS = 1000, MAX_POLL_MS = 8000, TIMEOUT_MS = 4000, OLD_MS = 3500;

let answeredAt = null, failures = 0, timer = null, isAsking = false, figures = null;

async function poll() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  try {
    const response = await fetch("debug/dashboard", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!response.ok) throw new Error(`status ${response.status}`);
    figures = await response.json();
    answeredAt = Date.now();
    failures = 0;
  } catch {
    failures += 1;
  }
  isAsking = false;
  if (failures === 0) show();
  showStatus();
  if (!document.hidden) timer = setTimeout(poll, Math.min(MAX_POLL_MS, POLL_MS * 2 ** failures));
}

function show() {
  $("model").textContent = figures.model;
  showTiles(figures);
  showCharts(figures);
  showWorkers(figures);
  showFlows(figures);
  showRequests(figures);
}

// [word, kind, what the banner says]
function judge() {
  const old = answeredAt === null ? Infinity : Date.now() - answeredAt;
  if (answeredAt === null) {
    return failures ? ["no answer", "bad", "The gateway does not answer. Trying again."] : ["connecting", "", ""];
  }
  if (failures > 1 || old > 3 * OLD_MS) {
    return ["gateway gone", "bad", `The gateway does not answer: everything below is ${age(old / 1000)} old. Trying again.`];
  }
  if (old > OLD_MS) return [`${age(old / 1000)} old`, "warn", ""];
  const ages = figures.workers.map((worker) => worker.load_age_s).filter((value) => value !== null);
  if (figures.draining) return ["shutting down", "warn", "The gateway is shutting down and takes no new requests."];
  if (ages.length && Math.min(...ages) > STALE_S) {
    return ["workers stale", "warn", `No worker has told its load for ${age(Math.min(...ages))}: is the registry gone?`];
  }
  if (!figures.ready) return ["not ready", "bad", "No matching pair of a prefill and a decode worker is up."];
  return ["live", "good", ""];
}

function showStatus() {
  const [word, kind, text] = judge();
  $("status").textContent = word;
  $("status").className = `pill ${kind}`;
  $("banner").textContent = text;
  $("banner").hidden = !text;
  document.body.classList.toggle("stale", word === "gateway gone");
}

$("more-flows").addEventListener("click", () => {
  showsAllFlows = !showsAllFlows;
  showFlows(figures);
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else poll();
});
setInterval(() => document.hidden || showStatus(), 1000);
poll();
