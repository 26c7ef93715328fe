// Makes the page live. Everything also works without it: links, forms, and loading again.
"use strict";

const LOOK_MS = 3000;

// -- live ------------------------------------------------------------------------------------
// One event for all parts of the page that change. A tab that nobody sees asks for nothing.

function look() {
  if (document.visibilityState === "visible") htmx.trigger(document.body, "look");
}

const versions = new Map(); // what each part shows, by its URL

document.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr, requestConfig, target } = event.detail;
  if (requestConfig.triggeringEvent?.type !== "look") {
    versions.clear(); // a part shows what a person asked for
    return;
  }
  // Nothing new: what is selected or focused stays as it is.
  const key = requestConfig.path;
  if (versions.get(key) === xhr.responseText) event.detail.shouldSwap = false;
  if (target.contains(document.activeElement) && document.activeElement.matches("input, select"))
    event.detail.shouldSwap = false; // somebody is filling a form in it
  const selection = document.getSelection();
  if (!selection.isCollapsed && target.contains(selection.anchorNode))
    event.detail.shouldSwap = false; // somebody is copying from it
  // Only what is shown: what was held back is shown by a later look.
  if (event.detail.shouldSwap) versions.set(key, xhr.responseText);
});

// The columns scroll sideways on small screens, and stay where they were.
let scrolls = new Map();
document.addEventListener("htmx:beforeSwap", (event) => {
  scrolls = new Map();
  for (const each of event.detail.target.querySelectorAll("[role=region]"))
    scrolls.set(each.id, each.scrollLeft);
});
document.addEventListener("htmx:afterSettle", () => {
  for (const [id, left] of scrolls) document.getElementById(id)?.scrollTo({ left });
  prepare();
});

const live = document.getElementById("live");
function say(state, words) {
  if (!live || live.dataset.state === state) return;
  live.hidden = false;
  live.dataset.state = state;
  live.textContent = words;
}
const sayAway = () => say("away", "No connection, trying again");
document.addEventListener("htmx:sendError", sayAway);
document.addEventListener("htmx:afterRequest", (event) => {
  const { status } = event.detail.xhr;
  if (status >= 500) sayAway();
  else if (status > 0) say("live", "Live"); // 0: no connection, or ended by the next request
});

// -- charts ----------------------------------------------------------------------------------

function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

const shorten = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const short = (value) => (value == null ? "–" : shorten.format(value));

function options(kind, element) {
  const colour = colours();
  const time = (each, seconds) => new Date(each * 1000).toISOString().slice(...(seconds ? [11, 19] : [11, 16]));
  const day = (each) => new Date(each * 1000).toISOString().slice(5, 10);
  const axis = { stroke: colour("text-soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const step = (name, fill) => ({ stroke: colour(name), fill: fill ? colour(fill) : undefined, width: 1.5, points: { show: false } });
  const times = {
    ...axis,
    size: 28,
    values: (_, ticks, __, ___, step) => ticks.map((each) => (step >= 86400 ? day(each) : time(each, step < 60))),
  };
  const clock = { label: "UTC", value: (_, each) => (each == null ? "–" : `${day(each)} ${time(each, true)}`) };
  const base = {
    tzDate: (each) => uPlot.tzDate(new Date(each * 1000), "Etc/UTC"),
    width: element.clientWidth,
    height: 180,
    cursor: { y: false, points: { size: 5 } },
    legend: { show: true, live: true },
    padding: [8, 8, 0, 0],
  };
  if (kind === "flow") {
    return {
      ...base,
      padding: [8, 16, 0, 0], // half of the last time is right of the end
      scales: { y: { range: (_, __, most) => [0, Math.max(1, most)] } },
      axes: [times, { ...axis, size: 52, values: (_, ticks) => ticks.map(short) }],
      series: [
        clock,
        // Drawn from the largest to the smallest, so that each covers the ones below it.
        { label: "Lines", ...step("bar-left", "bar-left"), value: (_, each) => short(each) },
        { label: "With an engine", ...step("running", "running-fill"), value: (self, each, __, index) => difference(self, 2, 3, index) },
        { label: "Failed", ...step("bad", "bad"), value: (self, each, __, index) => difference(self, 3, 4, index) },
        { label: "Answered", ...step("good", "good"), value: (_, each) => short(each) },
      ],
    };
  }
  return {
    ...base,
    scales: {
      y: { range: (_, __, most) => [0, Math.max(1, most)] },
      share: { range: [0, 100] },
    },
    axes: [
      times,
      { ...axis, size: 52, values: (_, ticks) => ticks.map(short) },
      { ...axis, scale: "share", side: 1, size: 44, grid: { show: false }, values: (_, ticks) => ticks.map((each) => `${each} %`) },
    ],
    series: [
      clock,
      { label: "Tokens/s", ...step("accent", "accent-fill"), value: (_, each) => short(each) },
      { label: "From the cache", ...step("hits"), scale: "share", dash: [4, 3], spanGaps: true, value: (_, each) => (each == null ? "–" : `${each} %`) },
    ],
  };
}

function difference(plot, upper, lower, index) {
  if (index == null) return "–";
  return short(plot.data[upper][index] - plot.data[lower][index]);
}

const plots = new Map();
function drawAll() {
  if (typeof uPlot === "undefined") return;
  for (const element of document.querySelectorAll("[data-chart]")) {
    let data = JSON.parse(element.dataset.points);
    if (element.dataset.chart === "flow") data = [data[0], data[4], data[3], data[2], data[1]];
    element.replaceChildren();
    plots.get(element.id)?.destroy();
    plots.set(element.id, new uPlot(options(element.dataset.chart, element), data, element));
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", () => {
  for (const [id, plot] of plots) {
    const element = document.getElementById(id);
    if (element) plot.setSize({ width: element.clientWidth, height: 180 });
  }
});

// -- a file that is dropped, and copying ---------------------------------------------------------

function prepareDrop() {
  const form = document.querySelector("form.drop");
  if (!form || form.dataset.ready) return;
  form.dataset.ready = "yes";
  const input = form.querySelector("input[type=file]");
  const state = document.getElementById("upload-state");
  const show = () => {
    const file = input.files[0];
    state.textContent = file ? `${file.name}, ${short(file.size)}B` : "";
  };
  for (const name of ["dragover", "dragleave", "drop"]) {
    form.addEventListener(name, (event) => {
      event.preventDefault();
      form.classList.toggle("over", name === "dragover");
    });
  }
  form.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    input.files = event.dataTransfer.files;
    show();
    form.requestSubmit();
  });
  input.addEventListener("change", show);
  form.addEventListener("submit", () => {
    state.textContent = "Uploading, checking and estimating …";
    form.classList.add("busy");
  });
  show();
}

function prepareCopies() {
  if (!navigator.clipboard) return;
  for (const button of document.querySelectorAll("button.copy[hidden]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const words = button.firstChild;
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copies).textContent);
      words.data = "Copied";
      setTimeout(() => (words.data = "Copy"), 1500);
    });
  }
}

function prepare() {
  drawAll();
  prepareDrop();
  prepareCopies();
}

prepare();
if (document.querySelector("[hx-trigger*=look]")) {
  say("live", "Live");
  setInterval(look, LOOK_MS);
  document.addEventListener("visibilitychange", look);
}
