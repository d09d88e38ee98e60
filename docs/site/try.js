// The page "Try it": rounding as the contract defines it (section R), in plain JavaScript.
"use strict";

// exponent bits, mantissa bits, bias, largest finite code, code of an overflow, code of NaN
const FORMATS = {
  bfloat16: [8, 7, 127, 0x7f7f, 0x7f80, 0x7fc0],
  float16: [5, 10, 15, 0x7bff, 0x7c00, 0x7e00],
  float8_e4m3fn: [4, 3, 7, 0x7e, 0x7f, 0x7f],
  float8_e5m2: [5, 2, 15, 0x7b, 0x7c, 0x7e],
  float8_e3m4: [3, 4, 3, 0x6f, 0x70, 0x78],
};

// The pattern of a float32 rounded to a format: stochastically by a word (R3), or to nearest if it is null (R2).
function roundTo(bits, dtype, word, saturate) {
  const [exponentBits, mantissaBits, bias, largest, overflow, nan] = FORMATS[dtype];
  const magnitude = bits & 0x7fffffff;
  const field = magnitude >>> 23;
  let code;
  if (magnitude > 0x7f800000) code = nan;
  else if (magnitude === 0x7f800000) code = saturate ? nan : overflow;
  else {
    const significand = (magnitude & 0x7fffff) + (field > 0 ? 0x800000 : 0);
    const exponent = Math.max(field, 1) - 127;
    const smallest = 1 - bias;
    const drop = Math.min(23 - mantissaBits + Math.max(0, smallest - exponent), 62);
    const unit = 2 ** drop; // numbers below 2^53 are exact
    const kept = Math.floor(significand / unit);
    const fraction = (significand - kept * unit) / unit;
    const up = word === null
      ? fraction > 0.5 || (fraction === 0.5 && kept % 2 === 1)
      : Math.floor(fraction * 65536 + 0.5) + (word >>> 16) >= 65536;
    code = Math.max(exponent - smallest, 0) * 2 ** mantissaBits + kept + (up ? 1 : 0);
    code = Math.min(code, saturate ? largest : overflow);
  }
  return code + (bits >>> 31) * 2 ** (exponentBits + mantissaBits);
}

function decode(code, dtype) {
  const [exponentBits, mantissaBits, bias, largest] = FORMATS[dtype];
  const top = 2 ** (exponentBits + mantissaBits);
  const magnitude = code % top;
  if (magnitude > largest) return NaN;
  const exponent = Math.floor(magnitude / 2 ** mantissaBits);
  const significand = (magnitude % 2 ** mantissaBits) + (exponent > 0 ? 2 ** mantissaBits : 0);
  const value = significand * 2 ** (Math.max(exponent, 1) - bias - mantissaBits);
  return code >= top ? -value : value;
}

// The word of an element (W8), under keys of this page.
function wordOf(index) {
  let x = (Math.imul(index, 0x85ebca6b | 1) + 0x27d4eb2f) >>> 0;
  for (const [shift, factor] of [[17, 0xed5ad4bb], [11, 0xac4c1b51], [15, 0x31848bab]]) {
    x = Math.imul(x ^ (x >>> shift), factor) >>> 0;
  }
  return (x ^ (x >>> 14)) >>> 0;
}

// How many golden vectors agree; of NaN neither sign nor payload is promised (R4).
function agreeing(vectors) {
  const codes = (text, base) => text.split(" ").map((each) => parseInt(each, base));
  return vectors.filter(([dtype, saturate, inputs, words, outputs]) => {
    const due = codes(outputs, 16);
    const drawn = words === null ? null : codes(words, 16);
    return codes(inputs, 16).every((bits, i) => {
      const found = roundTo(bits, dtype, drawn === null ? null : drawn[i], saturate);
      return found === due[i] || (Number.isNaN(decodeOrInfinity(found, dtype)) &&
        Number.isNaN(decodeOrInfinity(due[i], dtype)));
    });
  }).length;
}

function decodeOrInfinity(code, dtype) {
  const [exponentBits, mantissaBits, , , overflow, nan] = FORMATS[dtype];
  const magnitude = code % 2 ** (exponentBits + mantissaBits);
  return overflow !== nan && magnitude === overflow ? Infinity : decode(code, dtype);
}

const float = new Float32Array(1);
const pattern = new Uint32Array(float.buffer);
function bitsOf(x) {
  float[0] = x;
  return pattern[0];
}

const COUNT = 16384;
// Standard normal numbers, two from two words.
const NORMAL = Array.from({ length: 2 * COUNT }, (_, i) => {
  const [u, v] = [wordOf(4 * i) + 0.5, wordOf(4 * i + 1) + 0.5].map((word) => word / 2 ** 32);
  return Math.sqrt(-2 * Math.log(u)) * Math.cos(2 * Math.PI * v);
});

// The mean over all words of a float32 rounded stochastically (R3).
function mean(bits, dtype) {
  const [low, high] = [0, 0xffffffff].map((word) => decode(roundTo(bits, dtype, word, false), dtype));
  pattern[0] = bits;
  if (low === high) return low;
  return low + (Math.floor(((float[0] - low) / (high - low)) * 65536 + 0.5) / 65536) * (high - low);
}

// Updates rate * n are added to weights size * n. Return the share lost, and the movement applied, by rounding.
function loss(rate, size, dtype) {
  let lost = 0, due = 0, nearest = 0, stochastic = 0;
  for (let i = 0; i < COUNT; i++) {
    const weight = roundTo(bitsOf(size * NORMAL[i]), dtype, null, false);
    const update = rate * NORMAL[COUNT + i];
    const sum = bitsOf(Math.fround(decode(weight, dtype)) + Math.fround(update));
    const landed = roundTo(sum, dtype, null, false);
    const sign = Math.sign(update);
    lost += landed === weight || decode(landed, dtype) === decode(weight, dtype) ? 1 : 0;
    due += Math.abs(update);
    nearest += sign * (decode(landed, dtype) - decode(weight, dtype));
    stochastic += sign * (mean(sum, dtype) - decode(weight, dtype));
  }
  return { lost: lost / COUNT, nearest: nearest / due, stochastic: stochastic / due };
}

// A number of parameters: "8e9", "8B", "350M". An error says what is wrong.
function parameters(text) {
  const found = /^\s*([-+]?[\d_,]*\.?\d+(?:e[-+]?\d+)?)\s*([kmbt]?)\s*$/i.exec(text);
  if (!found) throw new Error(`"${text}" is no number of parameters. Write 8e9, 8B or 350M.`);
  const unit = { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 }[found[2].toLowerCase()];
  const count = Number(found[1].replace(/[_,]/g, "")) * unit;
  if (!(count >= 1 && count <= 1e15)) throw new Error(`${text} parameters: use a number from 1 to 1e15.`);
  return count;
}

function positive(text, name) {
  const x = Number(text);
  if (!(x > 0 && x <= 1e4)) throw new Error(`${name} "${text}": use a number above 0 and at most 1e4, such as 1e-4.`);
  return x;
}

const percent = (x) => `${(100 * x).toFixed(1)} %`;

function show(id, make) {
  const place = document.getElementById(id);
  try {
    place.innerHTML = make();
  } catch (error) {
    place.textContent = error.message;
  }
}

function chart(rate, size, dtype) {
  const [width, height, left, bottom] = [560, 220, 44, 34];
  const x = (lr) => left + ((Math.log10(lr) + 8) / 8) * (width - left - 10);
  const y = (share) => 10 + (1 - share) * (height - bottom - 10);
  const rates = Array.from({ length: 33 }, (_, i) => 10 ** (-8 + i / 4));
  const path = rates.map((lr, i) => `${i ? "L" : "M"}${x(lr).toFixed(1)},${y(loss(lr, size, dtype).lost).toFixed(1)}`);
  const marks = [-8, -6, -4, -2, 0].map((e) =>
    `<text x="${x(10 ** e)}" y="${height - 14}" text-anchor="middle">1e${e}</text>`);
  const shares = [0, 0.5, 1].map((s) =>
    `<line x1="${left}" x2="${width - 10}" y1="${y(s)}" y2="${y(s)}" stroke="currentColor" opacity="0.2"/>` +
    `<text x="${left - 6}" y="${y(s) + 4}" text-anchor="end">${100 * s} %</text>`);
  const here = Math.min(Math.max(rate, 1e-8), 1);
  return `<svg viewBox="0 0 ${width} ${height + 6}" role="img" font-size="11" fill="currentColor" style="max-width:40rem">` +
    `<title>Share of updates lost to nearest rounding, against the learning rate</title>${shares.join("")}` +
    `${marks.join("")}<text x="${width / 2}" y="${height}" text-anchor="middle">learning rate</text>` +
    `<path d="${path.join("")}" fill="none" style="stroke:var(--theirs)" stroke-width="2"/>` +
    `<circle cx="${x(here)}" cy="${y(loss(here, size, dtype).lost)}" r="5" style="fill:var(--ours)"/></svg>`;
}

function drawLoss(form) {
  show("loss-result", () => {
    const rate = positive(form.rate.value, "Learning rate");
    const size = positive(form.size.value, "Size of a weight");
    const { lost, nearest, stochastic } = loss(rate, size, form.dtype.value);
    return `<p><strong>${percent(lost)}</strong> of updates are lost to nearest rounding. ` +
      `${percent(nearest)} of the movement is applied. Stochastic rounding applies ${percent(stochastic)} on average.</p>` +
      chart(rate, size, form.dtype.value);
  });
}

function drawMemory(form) {
  show("memory-result", () => {
    const count = parameters(form.parameters.value);
    const most = globalThis.HALFSTEP.sizes[0][1];
    const rows = globalThis.HALFSTEP.sizes.map(([name, bytes, ours]) =>
      `<tr><td>${name}</td><td style="text-align:right">${bytes.toFixed(2)}</td>` +
      `<td style="text-align:right">${((count * bytes) / 1e9).toPrecision(3)}</td><td style="width:12rem">` +
      `<div style="height:0.7em;width:${(100 * bytes) / most}%;background:var(--${ours ? "ours" : "theirs"})"></div></td></tr>`);
    return `<table><thead><tr><th>weights, gradients and optimizer state</th><th>bytes per parameter</th><th>GB</th><th></th></tr>` +
      `</thead><tbody>${rows.join("")}</tbody></table>`;
  });
}

function start() {
  const { vectors } = globalThis.HALFSTEP;
  show("vectors", () => `${agreeing(vectors)} of ${vectors.length} golden vectors of rounding agree in your browser.`);
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const [id, draw] of [["loss", drawLoss], ["memory", drawMemory]]) {
    const form = document.getElementById(`${id}-form`);
    for (const field of form.elements) if (asked.has(field.name)) field.value = asked.get(field.name);
    form.addEventListener("input", () => draw(form));
    form.addEventListener("submit", (event) => event.preventDefault());
    draw(form);
  }
}

if (typeof document === "undefined") module.exports = { agreeing, loss, parameters, positive, roundTo };
else start();
