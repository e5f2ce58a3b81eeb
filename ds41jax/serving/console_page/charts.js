"use strict";
const byId = (id) => document.getElementById(id);
const HISTORY = 480, ROUNDS = 400, RECENT = 16, STRIP = 96, WORDS = 24;
const PARTS = [["choose", "prompt", "choose drafts"], ["build", "warn", "build the batch"],
  ["dispatch", "target", "run programs"], ["wait", "declined", "wait for the device"],
  ["emit", "accepted", "hand tokens out"]];
let state = null, before = null, offset = 0, retry = 500, dirty = false, gauges = false;
let rates = [], rounds = [], prefill = null;
const active = new Map();   // by id; `before` is the text before that of `words`

// ---------------------------------------------------------------- small things

function element(tag, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return node;
}
const number = (value) => value == null ? "–" : Math.round(value).toLocaleString("en");
const percent = (part, whole) => whole > 0 ? (100 * part / whole).toFixed(0) + " %" : "–";
const millis = (value) => value == null ? "–"
  : (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0)) + " ms";
const rate = (value) => value == null ? "–" : value.toFixed(value < 100 ? 1 : 0);
function seconds(value) {
  if (value == null) return "–";
  if (value < 10) return value.toFixed(2) + " s";
  if (value < 120) return Math.round(value) + " s";
  if (value < 7200) return Math.round(value / 60) + " min";
  return Math.round(value / 3600) + " h";
}
const short = (id) => id.replace("request-", "#");
const now = () => Date.now() / 1000 + offset;

function bar(...shares) {
  const outer = element("div", undefined, "bar");
  for (const [share, colour] of shares) {
    const inner = element("i");
    inner.style.width = Math.max(0, Math.min(100, 100 * share)) + "%";
    if (colour) inner.style.setProperty("--c", `var(--${colour})`);
    outer.append(inner);
  }
  return outer;
}

function facts(pairs) {
  const grid = element("div", undefined, "facts");
  for (const [name, value] of pairs) {
    if (value === undefined) grid.append(element("h3", name));
    else grid.append(element("span", name), element("div", value));
  }
  return grid;
}

function draw(canvas, paint) {
  const ratio = window.devicePixelRatio || 1;
  const wide = canvas.clientWidth, high = canvas.clientHeight;
  if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, wide, high);
  const style = getComputedStyle(document.documentElement);
  paint(context, wide, high, (name) => style.getPropertyValue("--" + name));
}

// ---------------------------------------------------------------- charts

/** Lines over time that end at the right edge, each on its own scale from zero. */
function lines(series, slots) {
  return (context, wide, high, colour) => {
    const room = high - 4;
    context.strokeStyle = colour("grid");
    context.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(2 + room * share) - 0.5;
      context.beginPath(); context.moveTo(0, y); context.lineTo(wide, y); context.stroke();
    }
    for (const [values, name] of series) {
      const most = Math.max(1e-9, ...values);
      context.strokeStyle = colour(name);
      context.lineWidth = 1.6;
      context.lineJoin = "round";
      context.beginPath();
      values.forEach((value, at) => {
        const x = wide * (1 - (values.length - 1 - at) / (slots - 1));
        context.lineTo(x, 2 + room * (1 - value / most));
      });
      context.stroke();
    }
  };
}

/** A round as a column: accepted drafts, the target's own tokens, then what was in vain. */
function columns(list, step, gap) {
  return (context, wide, high, colour) => {
    const shown = list.slice(-Math.floor(wide / step));
    const most = Math.max(6, ...shown.map((r) => r.emitted + r.drafted - r.accepted));
    const unit = (high - 1) / most, inset = unit > 4 ? 1 : 0;
    shown.forEach((r, at) => {
      const x = wide - (shown.length - at) * step;
      let y = high;
      const target = Math.max(0, r.emitted - r.accepted);
      const stack = [[r.accepted, "accepted"], [target, "target"],
        [r.verified - r.accepted, "rejected"], [r.drafted - r.verified, "declined"]];
      for (const [count, name] of stack) {
        context.fillStyle = colour(name);
        if (inset) {
          for (let n = 0; n < count; n++) {
            context.fillRect(x, y - unit + inset, step - gap, unit - inset);
            y -= unit;
          }
        } else if (count > 0) {
          context.fillRect(x, y - unit * count, step - gap, unit * count);
          y -= unit * count;
        }
      }
    });
  };
}

// ---------------------------------------------------------------- active requests

function entryOf(r) {
  let entry = active.get(r.id);
  if (!entry) {
    entry = { r, strip: [], words: [], before: r.text ?? "", prefill: null, drafted: 0, accepted: 0 };
    active.set(r.id, entry);
  }
  entry.r = r;
  return entry;
}

function requestNode(entry) {
  const node = element("div", undefined, "request"), who = element("div", undefined, "who");
  const what = element("div", undefined, "what"), canvas = element("canvas");
  entry.name = element("b"); entry.route = element("span");
  entry.progress = bar([0, "prompt"], [0, "target"]); entry.line = element("p");
  entry.canvas = canvas; entry.text = element("div", undefined, "words");
  who.append(entry.name, entry.route);
  what.append(entry.progress, entry.line);
  node.append(who, what, canvas, entry.text);
  return node;
}

function pieces(line, pairs) {
  line.replaceChildren(...pairs.filter(Boolean).map(([name, value]) => {
    const part = element("span", name + " ");
    part.append(element("b", value));
    part.lastChild.style.cssText = "color:var(--ink);font-weight:500";
    return part;
  }));
}

function renderRequest(entry) {
  const r = entry.r, p = entry.prefill, t = now();
  entry.node ??= requestNode(entry);
  entry.name.textContent = `${short(r.id)} ${r.state}`;
  const marks = [r.grammar ? "grammar" : "", r.images ? `${r.images} images` : ""].filter(Boolean);
  entry.route.textContent = [r.route.replace("/v1/", ""), ...marks].join(", ");
  const reading = r.state === "prefill" && p;
  const [read, written] = entry.progress.children;
  read.style.width = (reading ? 100 * p.done / p.total : 0) + "%";
  written.style.width = (r.state === "decode" && r.max ? 100 * r.gen / r.max : 0) + "%";
  const speed = r.first && r.gen > 1 ? r.gen / Math.max(t - r.first, 0.05) : null;
  pieces(entry.line, [
    ["prompt", number(r.prompt)], r.cached ? ["cached", number(r.cached)] : null,
    reading ? ["reading", `${number(p.done)} of ${number(p.total)}`] : null,
    r.gen ? ["written", `${number(r.gen)} of ${number(r.max)}`] : null,
    speed ? ["tokens/s", rate(speed)] : null,
    entry.drafted ? ["drafts accepted", percent(entry.accepted, entry.drafted)] : null,
    ["for", seconds(t - r.admitted)],
  ]);
  draw(entry.canvas, columns(entry.strip, 4, 1));
  renderWords(entry);
}

function renderWords(entry) {
  if (!state.text || !(entry.words.length || entry.before)) return;
  const flow = element("span", entry.before), last = entry.words.at(-1);
  for (const words of entry.words) {
    if (words.accepted) flow.append(element("ins", words.accepted));
    flow.append(words.target);
  }
  if (last?.rejected) flow.append(element("del", last.rejected));
  const line = element("p");
  line.append(flow);
  entry.text.replaceChildren(line);
}

function renderActive() {
  const host = byId("active"), ids = new Set(state.requests.map((r) => r.id));
  for (const [id, entry] of active) {
    if (!ids.has(id)) { entry.node?.remove(); active.delete(id); }
  }
  state.requests.forEach(entryOf);
  if (!state.requests.length) {
    if (!host.querySelector(".empty")) {
      host.replaceChildren(element("div", "Nothing is running.", "empty"));
    }
    return;
  }
  host.querySelector(".empty")?.remove();
  for (const r of state.requests) {
    const entry = active.get(r.id), fresh = !entry.node;
    entry.node ??= requestNode(entry);
    if (fresh) host.append(entry.node);
    renderRequest(entry);
  }
}
