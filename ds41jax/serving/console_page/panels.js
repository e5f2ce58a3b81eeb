// ---------------------------------------------------------------- panels of gauges

function table(heads, rows, none) {
  if (!rows.length) return element("div", none, "empty");
  const node = element("table"), head = element("tr");
  for (const name of heads) {
    head.append(element("th", name.replace("#", ""), name[0] === "#" ? "n" : ""));
  }
  node.append(head);
  for (const cells of rows) {
    const row = element("tr");
    cells.forEach((cell, at) => {
      const bad = cell === "failed" || cell === "cancelled";
      row.append(element("td", cell, heads[at][0] === "#" ? "n" : bad ? "bad" : ""));
    });
    node.append(row);
  }
  return node;
}

function recentTable() {
  const rows = state.recent.map((r) => [short(r.id), r.route.replace("/v1/", ""), r.reason,
    number(r.prompt), number(r.cached), number(r.gen),
    seconds(r.first ? r.first - r.admitted : null), seconds(r.retired - r.admitted),
    r.first && r.gen > 1 ? rate((r.gen - 1) / Math.max(r.retired - r.first, 1e-3)) : "–"]);
  return table(["request", "route", "ended", "#prompt", "#cached", "#tokens", "#first token",
    "#whole", "#tokens/s"], rows, "Nothing has finished yet.");
}

function tiles(g) {
  const e = g.engine, totals = e.totals ?? {}, last = rates.at(-1);
  const waiting = (e.waiting ?? 0) + g.http_queue_len;
  const values = [
    ["tokens written/s", last ? rate(last.output) : "–"],
    ["prompt tokens/s", last ? number(last.input) : "–"],
    ["running", `${e.active ?? g.http_active} of ${e.max_active ?? "–"}`],
    ["waiting", number(waiting)],
    ["drafts accepted", percent(totals.accepted, totals.drafted)],
    ["prompt from cache", percent(g.totals.cached_input_tokens, g.totals.input_tokens)],
    ["requests done", number(g.totals.requests_retired)],
    ["failed", number(g.totals.requests_failed), g.totals.requests_failed > 0],
  ];
  return values.map(([name, value, alarm]) => {
    const tile = element("div", undefined, alarm ? "card tile alarm" : "card tile");
    tile.append(element("b", value), element("i", name));
    return tile;
  });
}

function cachePanel(g) {
  const e = g.engine, c = e.cache ?? {}, node = element("div");
  const used = e.pool_pages - e.free_pages, kept = c.evictable_pages ?? 0;
  if (e.pool_pages) {
    node.append(bar([(used - kept) / e.pool_pages, "target"], [kept / e.pool_pages, "declined"]));
  }
  node.append(facts([
    ["pages of running requests", e.pool_pages ? number(used - kept) : "–"],
    ["pages kept for later prompts", number(kept)],
    ["pages in all", number(e.pool_pages)],
    ["snapshots of prompts, turns", `${number(c.prompts)}, ${number(c.turns)}`],
    ["whole, partial hits", `${number(c.exact_hits)}, ${number(c.partial_hits)}`],
    ["host memory: entries", number(c.host_entries)],
    ["stored, restored, evicted", `${number(c.stored)}, ${number(c.restored)}, ${number(c.evicted)}`],
  ]));
  return node;
}

function positionsPanel(policy) {
  const rows = (policy.confidence_reliability ?? []).filter((p) => p.reached > 0);
  if (!rows.length) return [element("div", "No drafts yet.", "empty")];
  const nodes = rows.map((p) => {
    const node = element("div", undefined, "position"), track = bar([p.accept_rate, "accepted"]);
    const expected = p.mean_confidence ?? p.mean_raw_confidence;
    if (expected != null) {
      const mark = element("u");
      mark.style.left = `calc(${100 * expected}% - 1px)`;
      track.append(mark);
    }
    node.append(element("span", p.position), track,
      element("b", (100 * p.accept_rate).toFixed(1) + " %"), element("span", number(p.reached)));
    return node;
  });
  nodes.push(element("div", "Of the drafts compared at each position; right, how many. " +
    "The mark is what the drafter expected.", "note"));
  return [...nodes, ...widthsPanel(policy)];
}

function widthsPanel(policy) {
  const widths = policy.draft_rows_histogram ?? [], most = Math.max(...widths, 1);
  const nodes = [facts([["Drafts verified, by request and round"]])];
  widths.forEach((count, drafts) => {
    if (!count) return;
    const row = element("div", undefined, "position");
    row.append(element("span", drafts), bar([count / most, "target"]),
      element("b", (100 * count / policy.request_rounds).toFixed(1) + " %"),
      element("span", number(count)));
    nodes.push(row);
  });
  return nodes;
}

function policyPanel(policy) {
  const pairs = [["policy", policy.mode ?? "off"]];
  const add = (name, value) => { if (value != null) pairs.push([name, value]); };
  if (policy.draft_limit != null) add("drafts at most", number(policy.draft_limit));
  if (policy.rounds) {
    add("rounds", number(policy.rounds));
    add("tokens a request and round",
      (1 + policy.accepted_drafts / Math.max(1, policy.request_rounds)).toFixed(2));
    add("drafts accepted of verified", percent(policy.accepted_drafts, policy.verified_drafts));
  }
  const error = policy.prediction;
  if (error?.rounds) add("predicted time off by", percent(error.mean_abs_relative_error, 1));
  for (const [place, title] of [["solo", "Fit, alone"], ["shared", "Fit, beside another lane"]]) {
    const fit = policy[place]?.round;
    if (!fit?.samples) continue;
    pairs.push([`${title} (${number(fit.samples)} rounds)`]);
    add("a round", millis(fit.intercept_us / 1000));
    add("each row", millis(fit.us_per_row / 1000));
    add("each request", millis(fit.us_per_request / 1000));
    add("residual", millis(fit.residual_scale_us / 1000));
  }
  return facts(pairs);
}

function timesPanel() {
  const shown = rounds.slice(-64);
  if (!shown.length) return element("div", "No rounds yet.", "empty");
  const mean = (name) => shown.reduce((sum, r) => sum + r.ms[name], 0) / shown.length;
  const means = PARTS.map(([name, colour, label]) => [mean(name), colour, label]);
  const whole = means.reduce((sum, [value]) => sum + value, 0);
  const node = element("div"), grid = element("div", undefined, "times");
  node.append(bar(...means.map(([value, colour]) => [value / whole, colour])));
  for (const [value, colour, label] of means) {
    const name = element("span", label);
    name.style.setProperty("--c", `var(--${colour})`);
    grid.append(name, element("b", millis(value)), element("b", percent(value, whole)));
  }
  node.append(grid);
  return node;
}

// ---------------------------------------------------------------- state and frames

function measure(g, at) {
  const current = { at, output: g.totals.output_tokens,
    input: g.totals.input_tokens - g.totals.cached_input_tokens };
  if (before && at > before.at) {
    const span = at - before.at;
    rates.push({ output: Math.max(0, current.output - before.output) / span,
      input: Math.max(0, current.input - before.input) / span });
    if (rates.length > HISTORY) rates.shift();
  }
  before = current;
}

function render() {
  dirty = false;
  const g = state.g, policy = g.engine.policy ?? {}, last = rounds.at(-1);
  if (gauges) {
    gauges = false;
    byId("tiles").replaceChildren(...tiles(g));
    byId("recent").replaceChildren(recentTable());
    byId("cache").replaceChildren(cachePanel(g));
    byId("positions").replaceChildren(...positionsPanel(policy));
    byId("policy").replaceChildren(policyPanel(policy));
    byId("times").replaceChildren(timesPanel());
    byId("uptime").textContent = `up ${seconds(g.uptime_seconds)}`;
    byId("round-note").textContent = rounds.length ? `mean of ${Math.min(64, rounds.length)}` : "";
    const written = rates.map((r) => r.output), read = rates.map((r) => r.input);
    byId("written").textContent = `written, up to ${number(Math.max(0, ...written))}`;
    byId("read").textContent = `read, up to ${number(Math.max(0, ...read))}`;
    draw(byId("rate"), lines([[read, "prompt"], [written, "target"]], HISTORY));
  }
  renderActive();
  byId("active-note").textContent = prefill && state.requests.some((r) => r.id === prefill.id)
    ? `reading ${short(prefill.id)}: ${prefill.rows} rows in ${millis(prefill.whole)}` : "";
  byId("rounds-note").textContent = last
    ? `last: ${last.req.length} requests, ${last.rows} rows, ${last.emitted} tokens in ${millis(last.whole)}`
    : "none yet";
  draw(byId("rounds"), columns(rounds, 7, 2));
  const times = rounds.slice(-160).map((r) => r.whole);
  byId("longest").textContent = times.length ? `last ${times.length}, up to ${millis(Math.max(...times))}` : "";
  draw(byId("round-times"), lines([[times, "soft"]], 160));
}

function soon() {
  if (dirty || document.hidden) return;
  dirty = true;
  requestAnimationFrame(() => { if (state) render(); else dirty = false; });
}

const total = (ms) => Object.values(ms).reduce((sum, value) => sum + value, 0);

function takeRound(event) {
  const sum = (name) => event.req.reduce((whole, one) => whole + one[name], 0);
  rounds.push({ ...event, whole: total(event.ms), drafted: sum("drafted"),
    verified: sum("verified"), accepted: sum("accepted"), emitted: sum("emitted") });
  if (rounds.length > ROUNDS) rounds.shift();
  for (const one of event.req) {
    const entry = active.get(one.id);
    if (!entry) continue;
    entry.strip.push(one);
    if (entry.strip.length > STRIP) entry.strip.shift();
    entry.drafted += one.verified;
    entry.accepted += one.accepted;
    if (one.text) entry.words.push(one.text);
    if (entry.words.length > WORDS) {
      const old = entry.words.shift();
      entry.before = (entry.before + old.accepted + old.target).slice(-600);
    }
  }
}

function takeEvent(event) {
  if (event.k === "round") return takeRound(event);
  if (event.k === "prefill") {
    prefill = { ...event, whole: total(event.ms) };
    const entry = active.get(event.id);
    if (entry) entry.prefill = event;
    return;
  }
  state.requests = state.requests.filter((r) => r.id !== event.id);
  if (event.k === "retire") state.recent = [event, ...state.recent].slice(0, RECENT);
  else { state.requests.push(event); entryOf(event); }
}

function take(message) {
  offset = message.now - Date.now() / 1000;
  if (message.type === "snapshot") {
    state = message;
    before = null;
    byId("model").textContent =
      `${message.config.model}, context ${number(message.config.context)}`;
    for (const r of state.requests) Object.assign(entryOf(r), { words: [], before: r.text ?? "" });
    measure(state.g, message.now);
    gauges = true;
  } else if (state) {
    (message.ev ?? []).forEach(takeEvent);
    if (message.active) {
      state.requests = message.active;
      state.requests.forEach(entryOf);
    }
    if (message.g) { state.g = message.g; measure(message.g, message.now); gauges = true; }
  }
  soon();
}

function connect() {
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const socket = new WebSocket(`${scheme}://${location.host}/v1/console`), link = byId("link");
  socket.onopen = () => { link.textContent = "live"; link.className = "up"; retry = 500; };
  socket.onmessage = (event) => take(JSON.parse(event.data));
  socket.onclose = () => {
    link.textContent = "disconnected, trying again";
    link.className = "";
    setTimeout(connect, retry);
    retry = Math.min(retry * 2, 8000);
  };
}
window.addEventListener("resize", () => { gauges = true; soon(); });
document.addEventListener("visibilitychange", () => { gauges = true; soon(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { gauges = true; soon(); });
connect();
