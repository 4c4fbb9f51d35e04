// The page: input, answer, examples, and what can be done with an answer.

import {fragmentOf, inputOf} from "./link.js";
import {start} from "./loader.js";
import {headings, language, setLanguage, text} from "./texts.js";
import {showTicket} from "./ticket.js";

const PASTED = "pasted.txt";
const ROWS = 13;
const FEW_ROWS = 4;
const LONG_LINK = 32000;
const at = id => document.getElementById(id);
const UNCHANGED = {createHTML: html => html, createScriptURL: address => address};
// Older browsers have no trusted types, and need no policy.
const policy = window.trustedTypes?.createPolicy("narthex", UNCHANGED) ?? UNCHANGED;
const state = {files: [], example: null, input: null, answer: null, engine: null, gallery: []};

// ---- status -----------------------------------------------------------------------------------------------------------

function say(message, kind = "") {
  const status = at("status");
  status.textContent = message;
  status.className = `status ${kind}`;
}

function progress(percent, key) {
  at("progress").value = percent;
  if (percent < 100) say(text(key));
}

// ---- input ------------------------------------------------------------------------------------------------------------

function inputNow() {
  const pasted = at("source").value;
  const options = Object.fromEntries([...document.querySelectorAll(".options [name]")].map(each => [each.name, each.value.trim()]));
  return {
    source: at("from").value.trim(), destination: at("to").value.trim(),
    options: Object.fromEntries(Object.entries(options).filter(([, value]) => value)),
    files: [...(pasted.trim() ? [[PASTED, pasted]] : []), ...state.files],
  };
}

function fill(input) {
  at("from").value = input.source;
  at("to").value = input.destination;
  for (const each of document.querySelectorAll(".options [name]")) each.value = input.options[each.name] ?? "";
  at("more").open = Object.keys(input.options).length > 0;
  // A single text can be edited; several keep their names.
  const [first] = input.files;
  const single = input.files.length === 1 && typeof first[1] === "string";
  at("source").value = single ? first[1] : "";
  state.files = single ? [] : input.files;
  showFiles();
}

function showFiles() {
  at("files").hidden = !state.files.length;
  at("source").rows = state.files.length ? FEW_ROWS : ROWS;
  at("files").replaceChildren(...state.files.map(([name, content], position) => {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "✕";
    remove.setAttribute("aria-label", text("remove", name));
    remove.addEventListener("click", () => {
      state.files = state.files.filter((_, index) => index !== position);
      showFiles();
      at("source").focus();
    });
    item.append(`${name} · ${sizeText(content.length)}`, remove);
    return item;
  }));
}

const sizeText = size => size < 1024 ? `${size} B` : size < 1 << 20 ? `${Math.round(size / 1024)} kB` : `${(size / (1 << 20)).toFixed(1)} MB`;

// A file is text unless it is compressed or has bytes that no text has.
async function add(files) {
  for (const file of files) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    let content = bytes;
    if (!bytes.subarray(0, 4096).includes(0) && !(bytes[0] === 0x1f && bytes[1] === 0x8b)) content = new TextDecoder().decode(bytes);
    state.files.push([file.name, content]);
  }
  state.example = null;
  showFiles();
  say(text("added", files.length));
}

// ---- trace ------------------------------------------------------------------------------------------------------------

async function trace() {
  const input = inputNow();
  if (!input.files.length) {
    say(text("nothing"), "bad");
    at("source").focus();
    return;
  }
  at("trace").disabled = true;
  say(text("tracing"));
  const begin = performance.now();
  try {
    const answer = await state.engine.trace(input);
    Object.assign(state, {input, answer});
    show(performance.now() - begin);
  } catch (error) {
    say(text("broken", error.message), "bad");
  } finally {
    at("trace").disabled = false;
  }
}

function show(milliseconds) {
  const {answer} = state;
  showStory();
  const found = Boolean(answer.output.html);
  at("answer").hidden = !found;
  if (!found) {
    say(answer.messages.trim(), "bad");
    return;
  }
  const result = showTicket(policy, answer.output.html, at("ticket"), word);
  at("notes").hidden = !answer.messages.trim();
  at("notes").textContent = answer.messages.trim();
  at("terminal").textContent = ["narthex trace", ...answer.arguments.map(quoted)].join(" ");
  say(`${result.textContent} (${(milliseconds / 1000).toFixed(1)} s)`, result.classList.contains("good") ? "good" : result.classList.contains("bad") ? "bad" : "");
  if (matchMedia("(max-width: 60rem)").matches) at("answer").scrollIntoView({block: "start"});
}

const word = (found, element) => /^h\d$/.test(element) ? headings(found) : found;

const quoted = each => /^[\w./:@,=-]+$/.test(each) ? each : `'${each.replaceAll("'", `'\\''`)}'`;

// ---- what can be done with an answer -----------------------------------------------------------------------------------

async function copy(content, said) {
  try {
    await navigator.clipboard.writeText(content);
    say(said, "good");
  } catch {
    say(text("notCopied"), "bad");
  }
}

async function copyLink() {
  const fragment = await fragmentOf(state.input);
  history.replaceState(null, "", fragment);
  const size = location.href.length;
  await copy(location.href, text(size > LONG_LINK ? "longLink" : "copiedLink", Math.round(size / 1000)));
}

function save(name, type, content) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(new Blob([content], {type}));
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 1000);
}

// ---- examples ----------------------------------------------------------------------------------------------------------

function showGallery() {
  for (const group of ["walks", "bugs"]) {
    at(group).replaceChildren(...state.gallery.filter(each => each.group === group).map(example => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      const [title, about] = [document.createElement("strong"), document.createElement("span")];
      button.type = "button";
      button.id = `example-${example.id}`;
      button.setAttribute("aria-pressed", String(state.example === example));
      title.textContent = example.title[language()];
      about.textContent = example.about[language()];
      button.append(title, about);
      button.addEventListener("click", () => choose(example));
      item.append(button);
      return item;
    }));
  }
}

async function choose(example) {
  state.example = example;
  history.replaceState(null, "", location.pathname + location.search);
  fill(example);
  showGallery();
  await trace();
  at("answer").hidden || at("answer").focus({preventScroll: true});
  at("story").scrollIntoView({block: "start"});
}

function showStory() {
  const {example} = state;
  at("story").hidden = !example;
  if (!example) return;
  at("story-title").textContent = example.title[language()];
  at("story-text").textContent = example.story[language()];
  at("story-link").parentElement.hidden = !example.thread;
  if (example.thread) at("story-link").href = example.thread;
}

// ---- languages -----------------------------------------------------------------------------------------------------------

function translate() {
  document.documentElement.lang = language();
  document.title = text("title");
  for (const each of document.querySelectorAll("[data-text]")) each.textContent = text(each.dataset.text);
  for (const each of document.querySelectorAll("[data-label]")) each.setAttribute("aria-label", text(each.dataset.label));
  at("source").placeholder = text("placeholder");
  showGallery();
  showFiles();
  showStory();
}

// ---- begin -----------------------------------------------------------------------------------------------------------------

function listen() {
  at("language").value = language();
  at("language").addEventListener("change", () => {
    setLanguage(at("language").value);
    translate();
    if (state.answer?.output.html) showTicket(policy, state.answer.output.html, at("ticket"), word);
    say(state.engine ? text("ready") : text("loading"));
  });
  at("ask").addEventListener("submit", event => {
    event.preventDefault();
    trace();
  });
  at("source").addEventListener("input", () => { state.example = null; });
  at("source").addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
  });
  at("clear").addEventListener("click", () => {
    Object.assign(state, {example: null, files: []});
    fill({source: "", destination: "", options: {}, files: []});
    at("answer").hidden = at("story").hidden = true;
    history.replaceState(null, "", location.pathname + location.search);
    showGallery();
    say("");
    at("source").focus();
  });
  at("chooser").addEventListener("change", async () => {
    await add([...at("chooser").files]);
    at("chooser").value = "";
  });
  for (const name of ["dragover", "dragenter"]) at("ask").addEventListener(name, event => {
    event.preventDefault();
    at("drop").classList.add("over");
  });
  at("ask").addEventListener("dragleave", () => at("drop").classList.remove("over"));
  at("ask").addEventListener("drop", event => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    at("drop").classList.remove("over");
    add([...event.dataTransfer.files]);
  });
  at("copy").addEventListener("click", () => copy(state.answer.output.text, text("copied")));
  at("link").addEventListener("click", copyLink);
  at("save-page").addEventListener("click", () => save("path.html", "text/html", state.answer.output.html));
  at("save-json").addEventListener("click", () => save("path.json", "application/json", state.answer.output.json));
}

async function run() {
  at("trace").disabled = true;
  listen();
  translate();
  try {
    state.engine = await start(policy, progress);
  } catch (error) {
    say(text("notLoaded", error.message), "bad");
    return;
  }
  // For scripts, and for the console.
  window.narthex = {trace: state.engine.trace};
  state.gallery = state.engine.gallery;
  showGallery();
  at("loading").hidden = true;
  at("trace").disabled = false;
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  say(text("ready"));
  try {
    const input = await inputOf(location.hash);
    if (input === null) return;
    fill(input);
    await trace();
  } catch (error) {
    say(text("badLink", error.message), "bad");
  }
}

run();
