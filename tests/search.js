// Ask the search of a built site as its pages do: node search.js SITE QUERY... prints the places of each, best first.
const fs = require("fs"), path = require("path");
const [site, ...queries] = process.argv.slice(2);
const workers = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
let listen;
const waiting = [];
globalThis.self = globalThis;
globalThis.addEventListener = (_, call) => (listen = call);
globalThis.postMessage = (message) => waiting.shift()?.(message);
globalThis.importScripts = () => {};
const ask = (message) => new Promise((done) => (waiting.push(done), listen({data: message})));
new Function("location", "window", fs.readFileSync(path.join(workers, worker), "utf8"))({href: "http://x/"}, undefined);
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
(async () => {
  await ask({type: 0, data: {...index, options: {suggest: true}}});
  for (const query of queries) {
    const found = await ask({type: 2, data: query});
    const places = (found.data.items || found.data).map((items) => items[0].location);
    console.log(JSON.stringify([query, places.slice(0, 6)]));
  }
})();
