// Before anything is drawn: the theme that was chosen last, or the system's.
"use strict";
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    const kept = localStorage.getItem("narthex-theme");
    return kept === "light" || kept === "dark" ? kept : "auto";
  };
  const show = () => {
    const choice = chosen();
    document.documentElement.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
  };
  show();
  system.addEventListener("change", show);
  addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = chosen();
    select.addEventListener("change", () => {
      localStorage.setItem("narthex-theme", select.value);
      show();
    });
  });
})();
