"use strict";
// Elements and numbers. Text goes into the page as text, never as markup.

const $ = (id) => document.getElementById(id);

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function seconds(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (value === 0) return "0";
  if (value < 1e-3) return `${Math.round(value * 1e6)}\u00a0µs`;
  return value < 1 ? `${digits(value * 1e3)}\u00a0ms` : `${digits(value)}\u00a0s`;
}

function age(value) {
  if (value < 100) return `${Math.max(0, Math.round(value))} s`;
  return value < 6000 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

function scaled(value, step, units) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  let at = 0;
  while (Math.abs(value) >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  const number = at === 0 && Number.isInteger(value) ? String(value) : digits(value);
  return units[at] ? `${number}\u00a0${units[at]}` : number;
}

const count = (value) => scaled(value, 1000, ["", "k", "M", "G", "T"]);
const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}\u00a0%`;
const rounded = (text) => text.replace(/\.?0+(?=\D|$)/g, (zeros, at) => // 2.50 ms on an axis is 2.5 ms
  text.slice(0, at + 1).includes(".") ? "" : zeros);

// Bring the children of `parent` to those of `items`, keeping what is known by key: whoever has
// the focus or the pointer on a row keeps it.
function keyed(parent, known, items, key, create, update) {
  const kept = new Set();
  let next = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    kept.add(name);
    let row = known.get(name);
    if (!row) known.set(name, (row = create(item)));
    update(row, item);
    if (row.element === next) next = next.nextSibling;
    else parent.insertBefore(row.element, next);
  }
  for (const [name, row] of known) {
    if (kept.has(name)) continue;
    row.element.remove();
    known.delete(name);
  }
}
